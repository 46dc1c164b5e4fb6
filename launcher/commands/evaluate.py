"""``mode=eval`` and ``mode=predict``: a checkpoint on the validation text, at any pp and dp."""

from __future__ import annotations

from pathlib import Path

from launcher.commands.predicted import run_mapping
from launcher.commands.ranks import check_before_start, find_checkpoint, run_ranks
from launcher.config import LaunchConfig
from launcher.report.result import write_result
from launcher.resolve import resolve
from launcher.terminal import say
from strategies.errors import RunError


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Runs the forward program over the validation text."""
    resolved = resolve(config)
    checkpoint = find_checkpoint(resolved, config.checkpoint, optional=False)
    check_before_start(resolved, checkpoint)
    say(f"checkpoint: {checkpoint}")
    common = run_mapping(resolved, "done")
    result = run_dir / "result.json"
    try:
        outcome = run_ranks(resolved, run_dir, checkpoint, lambda _: None)
    except RunError as error:
        write_result(result, common | {"status": "failed", "error": str(error)})
        raise
    write_result(result, common | outcome)
    if config.mode == "eval":
        say(f"loss {outcome['val_loss']:.6f}")
    else:
        say(f"{outcome['num_predictions']} predictions: {outcome['predictions']}")
    say(f"files: {run_dir}")
    return 0
