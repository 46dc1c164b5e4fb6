"""What the parent's terminal shows of a training run: a bar, or plain lines where it is none."""

from __future__ import annotations

import sys
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

from launcher.terminal import say

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
            self._bar.console.print(text, highlight=False)
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
