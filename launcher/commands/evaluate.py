"""``mode=eval`` and ``mode=predict``: a checkpoint on the validation text, at any pp and dp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.commands.predicted import run_mapping
from launcher.commands.ranks import (
    check_before_start,
    check_world,
    failure_recorded,
    find_checkpoint,
    has_weights,
    run_ranks,
)
from launcher.config import LaunchConfig
from launcher.report.result import write_result
from launcher.resolve import Run, resolve
from launcher.terminal import say


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Runs the forward program over the validation text."""
    check_world(config)
    resolved = resolve(config)
    checkpoint = find_checkpoint(
        resolved, config.checkpoint, run_dir, optional=has_weights(resolved)
    )
    check_before_start(resolved, checkpoint)
    say(f"checkpoint: {checkpoint or f'none, the weights in {config.model.path}'}")
    common = run_mapping(resolved, "done")
    result = run_dir / "result.json"
    with failure_recorded(result, common):
        outcome = run_ranks(resolved, run_dir, checkpoint, lambda _: None)
    return finish(resolved, run_dir, outcome)


def finish(resolved: Run, run_dir: Path, outcome: dict[str, Any]) -> int:
    """Writes and prints what the ranks have found."""
    write_result(run_dir / "result.json", run_mapping(resolved, "done") | outcome)
    if resolved.config.mode == "eval":
        say(f"loss {outcome['val_loss']:.6f}")
    else:
        say(f"{outcome['num_predictions']} predictions: {', '.join(outcome['predictions'])}")
    say(f"files: {run_dir}")
    return 0
