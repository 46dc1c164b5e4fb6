"""``outcome.json``: what rank 0 leaves for whoever started it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from launcher.processes.preempted import PreemptedError
from launcher.report.result import write_result

OUTCOME = "outcome.json"
_STOPPED_BY = "stopped_by"


def write_outcome(run_dir: Path, outcome: dict[str, Any], *, stopped_by: str | None) -> None:
    """Writes the file; a signal's name marks a run that was asked to stop."""
    write_result(run_dir / OUTCOME, {**outcome, _STOPPED_BY: stopped_by})


def wait_for_outcome(run_dir: Path, *, timeout_s: float = 20.0) -> None:
    """Returns when rank 0 has written the file, or does not seem to."""
    until = time.monotonic() + timeout_s
    while not (run_dir / OUTCOME).is_file() and time.monotonic() < until:
        time.sleep(0.05)


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
