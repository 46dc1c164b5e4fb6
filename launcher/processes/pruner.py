"""Ends jobs of a sweep that lag behind: the median rule, at steps that the user names.

At step ``s`` of ``sweep.prune_at`` a job's score is the mean of its ``train_loss`` over the last
tenth of the steps till then. It is ended where that is above the median of the scores that other
jobs of the sweep have had at ``s``, finished, pruned or running, once there are
``sweep.prune_after`` of them (Golovin et al., 2017, Vizier, section 3.3.2, with the loss at that
step in place of its average).

Jobs that run side by side know of each other by ``pruning.csv`` in the sweep's folder, which is
also the record of what was decided.
"""

from __future__ import annotations

import csv
import fcntl
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.config import LaunchConfig
from launcher.processes.preempted import PrunedError
from launcher.processes.progress import ProgressView

RECORD = "pruning.csv"
_COLUMNS = ("step", "job", "train_loss", "median", "verdict")
_SHARE = 10  # of the steps till then: over so many the loss is averaged


class Pruner:
    """What hears of each step, hands it on, and ends the run where it lags.

    Args:
        job: Its folder below the sweep's.
    """

    def __init__(
        self, view: ProgressView, folder: Path, job: str, steps: Sequence[int], least: int
    ) -> None:
        self._view = view
        self._file = folder / RECORD
        self._job = job
        self._due = sorted(steps)
        self._least = least
        self._losses: list[tuple[int, float]] = []

    def __call__(self, event: dict[str, Any]) -> None:
        """Takes one event of rank 0.

        Raises:
            PrunedError: The job's score is above the median.
        """
        self._view(event)
        if event["kind"] == "start":  # of a run that goes on: what is behind it was judged then
            self._due = [step for step in self._due if step > event["step"]]
        elif event["kind"] == "step" and event["loss"] is not None:
            self._losses.append((event["step"], event["loss"]))
            while self._due and event["step"] >= self._due[0]:
                self._judge(self._due.pop(0))

    def _judge(self, step: int) -> None:
        known = [loss for at, loss in self._losses if at <= step]
        recent = [loss for at, loss in self._losses if step - max(1, step // _SHARE) < at <= step]
        if not known:
            return
        score = statistics.fmean(recent or known[-1:])
        median, count, worse = self._compare(step, score)
        if worse:
            raise PrunedError(
                f"train_loss {score:.4g} at step {step} is above {median:.4g}, the median of "
                f"{count} other jobs (sweep.prune_at).",
                {"steps": self._losses[-1][0], "loss_last": self._losses[-1][1]},
            )

    def _compare(self, step: int, score: float) -> tuple[float, int, bool]:
        """The others' median, how many they are, and whether this job is to end; writes it down."""
        with self._file.open("a+", newline="", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            rows = list(csv.DictReader(file))
            others = {
                row["job"]: float(row["train_loss"])
                for row in rows
                if row["step"] == str(step) and row["job"] != self._job
            }
            median = statistics.median(others.values()) if others else score
            worse = len(others) >= self._least and score > median
            writer = csv.writer(file, lineterminator="\n")
            if not rows:
                writer.writerow(_COLUMNS)
            verdict = "pruned" if worse else "goes on"
            writer.writerow((step, self._job, f"{score:.6g}", f"{median:.6g}", verdict))
        return median, len(others), worse


def pruned(view: ProgressView, config: LaunchConfig, run_dir: Path) -> ProgressView | Pruner:
    """The view itself where nothing is pruned."""
    sweep = config.sweep
    if not sweep.prune_at or sweep.dir is None:
        return view
    folder = Path(sweep.dir)
    job = run_dir.relative_to(folder).as_posix() if run_dir.is_relative_to(folder) else str(run_dir)
    return Pruner(view, folder, job, sweep.prune_at, sweep.prune_after)
