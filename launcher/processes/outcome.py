"""``outcome.json``: what rank 0 leaves for whoever started it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.processes.preempted import PreemptedError
from launcher.report.result import write_result

OUTCOME = "outcome.json"
_STOPPED_BY = "stopped_by"


def write_outcome(run_dir: Path, outcome: dict[str, Any], *, stopped_by: str | None) -> None:
    """Writes the file; a signal's name marks a run that was asked to stop."""
    write_result(run_dir / OUTCOME, {**outcome, _STOPPED_BY: stopped_by})


def take_outcome(run_dir: Path) -> dict[str, Any]:
    """Reads the file, which is gone then.

    Raises:
        PreemptedError: The run was asked to stop, and has written a checkpoint.
        OSError: There is none.
    """
    file = run_dir / OUTCOME
    found: dict[str, Any] = json.loads(file.read_text())
    file.unlink()
    signal = found.pop(_STOPPED_BY)
    if signal is not None:
        checkpoint, step = found["checkpoint"], found["steps"]
        raise PreemptedError(
            f"{signal} has stopped the run after step {step}, with a checkpoint: {checkpoint}. "
            f"Continue with trainer.resume={checkpoint}.",
            {"steps": step, "checkpoint": checkpoint},
        )
    return found
