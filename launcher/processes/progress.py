"""What the parent does at each step of a training run: shows it, and ends a sweep's job that lags.

The terminal has a bar, or plain lines where it is none. Jobs are ended by the median rule, at steps
that the user names: at step ``s`` of ``sweep.prune_at`` a job's score is the mean of its
``train_loss`` over the last tenth of the steps till then. It is ended where that is above the
median of the scores that other jobs of the sweep have had at ``s``, finished, pruned or running,
once there are ``sweep.prune_after`` of them (Golovin et al., 2017, Vizier, section 3.3.2, with the
loss at that step in place of its average). Jobs that run side by side know of each other by
``pruning.csv`` in the sweep's folder, which is also the record of what was decided.
"""

from __future__ import annotations

import csv
import fcntl
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from launcher.config import LaunchConfig
from launcher.processes.preempted import PrunedError
from launcher.terminal import say
from strategies.errors import readable

_LINES = 20


class ProgressView:
    """Shows step, loss, tokens/s and bubble; a context manager around the run."""

    def __init__(self, *, enabled: bool, total: int | None = None) -> None:
        """``total``: steps to be made, where they are known; -1 where something else ends it."""
        self._total = total if total is not None and total > 0 else None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._every = 1
        self._last = 0
        self._enabled = enabled
        self._terminal = sys.stdout.isatty()

    def __enter__(self) -> ProgressView:
        if self._enabled and self._terminal:
            columns = (
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console())
            self._bar.start()
            self._task = self._bar.add_task("train", total=self._total, figures="starting ranks")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        if not self._enabled:
            return
        if event["kind"] == "start":
            most = event["max_steps"] if event["max_steps"] > 0 else None
            self._last = most or 0
            self._every = max(1, (most or 100) // _LINES)
            if self._bar is not None and self._task is not None:
                self._bar.update(
                    self._task, total=most, completed=event["step"], figures="first step"
                )
        elif event["kind"] == "step":
            self._step(event)
        elif event["kind"] == "note":
            self._line(event["text"])
        elif event["kind"] == "skipped":
            self._line(
                f"step {event['step']:>6}  left out: loss or gradient not finite "
                f"({event['count']} so far; the log of rank 0 names the place)"
            )
        elif event["kind"] == "validation" and event.get("val_loss") is not None:
            self._line(f"step {event['step']:>6}  val_loss {event['val_loss']:.4f}")

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(Text(readable(text)), highlight=False)
        else:
            say(text)

    def _step(self, event: dict[str, Any]) -> None:
        loss = event["loss"]
        figures = [] if loss is None else [f"loss {loss:.4f}"]
        if event["tokens_per_s"] is not None:
            figures.append(f"{event['tokens_per_s']:,.0f} tokens/s")
        if event["bubble_ratio"] is not None:
            figures.append(f"bubble {event['bubble_ratio']:.0%}")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event["step"], figures="  ".join(figures))
        elif event["step"] % self._every == 0 or event["step"] in (1, self._last):
            say(f"step {event['step']:>6}  {'  '.join(figures)}")


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
