"""``mode=generate``: continues a prompt with a checkpoint's model, whole on one process."""

from __future__ import annotations

from pathlib import Path

from launcher.commands.predicted import run_mapping
from launcher.commands.ranks import check_before_start, find_checkpoint, run_ranks
from launcher.config import LaunchConfig
from launcher.report.result import write_result
from launcher.resolve import resolve
from launcher.terminal import say
from strategies.errors import PlanError


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Generates text.

    Raises:
        PlanError: More than one rank was asked for.
    """
    if config.pp != 1 or config.dp not in (1, "auto"):
        raise PlanError(
            f"mode=generate runs the whole model on one process, not on pp={config.pp} "
            f"dp={config.dp}. Try mode=generate pp=1 dp=1 (any checkpoint can be read so)."
        )
    resolved = resolve(config)
    checkpoint = find_checkpoint(resolved, config.checkpoint, optional=False)
    check_before_start(resolved, checkpoint)
    outcome = run_ranks(resolved, run_dir, checkpoint, lambda _: None)
    write_result(run_dir / "result.json", run_mapping(resolved, "done") | outcome)
    say(str(outcome["text"]))
    return 0
