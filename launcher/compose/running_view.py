"""The jobs of a sweep that run at this moment, on a terminal: a line each, gone when they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from launcher.terminal import terminal_width
from strategies.errors import readable

_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Job:
    label: str
    output: Path
    since: float


class RunningView:
    """A context manager around the sweep.

    Args:
        threaded: Whether a thread draws it; not where this process forks meanwhile, which then
            calls ``refresh``.
    """

    def __init__(self, *, enabled: bool, threaded: bool = True) -> None:
        self._jobs: dict[int, _Job] = {}
        self._live: Live | None = None
        if enabled:
            self._live = Live(
                get_renderable=self._lines,
                console=Console(highlight=False),
                transient=True,
                auto_refresh=threaded,
                refresh_per_second=2,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> RunningView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def begun(self, index: int, label: str, output: Path) -> None:
        """``output``: what the job says, of which the last line is shown."""
        self._jobs[index] = _Job(label, output, time.monotonic())
        self.refresh()

    def ended(self, index: int) -> None:
        self._jobs.pop(index, None)
        self.refresh()

    def print(self, text: str, plainly: Callable[[str], None]) -> None:
        """A line that stays; ``plainly`` prints it where there is no view."""
        if self._live is None:
            plainly(text)
        else:
            self._live.console.print(Text(readable(text)), soft_wrap=True)

    def refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _lines(self) -> Text:
        width = terminal_width()
        lines = []
        for index, job in sorted(self._jobs.items()):
            took = int(time.monotonic() - job.since)
            text = f"job {index}  {job.label}  {took // 60}:{took % 60:02}  {_last(job.output)}"
            lines.append(readable(text)[: width - 1])
        return Text("\n".join(lines), style="dim")


def _last(file: Path) -> str:
    """The last line of a file that is being written."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            lines = stream.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
