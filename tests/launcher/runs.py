"""Starts ``python -m launcher`` as a user does: a process of its own, in a folder of its own."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.processes.rank_server import SHARED
from tests.ranks.launcher_server import run_forked, serves
from tests.ranks.rank_server import rank_server_address, shares, variables

# 12,112 parameters on bytes: a step takes milliseconds, what remains is starting up.
MODEL = (
    "model.layers=2", "model.hidden=16", "model.heads=2", "model.kv_heads=1", "model.ffn=24",
    "model.sequence=16",
)  # fmt: skip


_WITH_RANKS = ("train", "eval", "predict", "generate", "export", "profile")
_MODES_WITH_RANKS = {f"mode={name}" for name in _WITH_RANKS}


@dataclass(frozen=True)
class Finished:
    """A run that has ended.

    Attributes:
        code: Exit code.
        output: Standard output.
        errors: Standard error.
        cwd: Where it was started.
    """

    code: int
    output: str
    errors: str
    cwd: Path

    @property
    def folder(self) -> Path:
        """The run's folder, wherever below ``cwd`` it is."""
        (found,) = (path.parent for path in self.cwd.rglob(".hydra"))
        return found

    @property
    def result(self) -> dict[str, Any]:
        return read_result(self.folder)

    def assert_done(self) -> Finished:
        assert self.code == 0, f"{self.errors}\n{self.output}"
        return self


def environment(home: Path, **more: str) -> dict[str, str]:
    """The variables of a run."""
    return {**variables(), "HOME": str(home), **more}


def _rank_server(words: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Where a run forks its ranks, if it has ranks; ``cluster.*`` says that a test cares."""
    modes = {word for word in words if word.startswith("mode=")}
    cares = any(word.startswith("cluster") for word in words)
    if cares or modes - _MODES_WITH_RANKS or not shares(given):
        return {}
    return {SHARED: rank_server_address()}


def launch(
    words: Sequence[str], cwd: Path, *, timeout_s: float = 120, fresh: bool = False, **more: str
) -> Finished:
    """Runs one command line to its end.

    ``fresh``: in a process that is started, where that matters to a test; else in a forked one.
    """
    cwd.mkdir(parents=True, exist_ok=True)
    given = environment(cwd, **more)
    has = given | _rank_server(words, given)
    if not fresh and serves(has):
        return Finished(*run_forked(words, cwd, has, timeout_s=timeout_s), cwd)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "launcher", *words],
        cwd=cwd,
        env=has,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return Finished(done.returncode, done.stdout, done.stderr, cwd)


class Started:
    """A run that goes on: something is about to happen to it."""

    def __init__(self, words: Sequence[str], cwd: Path, *, terminal: int | None = None) -> None:
        """Args: terminal: A descriptor that output and errors go to in place of files."""
        cwd.mkdir(parents=True, exist_ok=True)
        self.cwd = cwd
        self._output = (cwd / "stdout.txt").open("w+")
        self._errors = (cwd / "stderr.txt").open("w+")
        given = environment(cwd)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words],
            cwd=cwd,
            env=given | _rank_server(words, given),
            stdout=self._output if terminal is None else terminal,
            stderr=self._errors if terminal is None else terminal,
            # Under nohup, and in a shell's background, some are ignored, and would be here.
            preexec_fn=_hears_everything,
        )

    @property
    def output(self) -> str:
        return (self.cwd / "stdout.txt").read_text()

    def wait_for_step(self, step: int, timeout_s: float = 150) -> None:
        """Returns when ``metrics.csv`` has the row of a step, or fails."""

        def there() -> bool:
            assert self.process.poll() is None, self.output + self.errors
            # Not rglob: a folder of a checkpoint may go while it is looked into.
            files = [
                Path(folder, name)
                for folder, _, names in os.walk(self.cwd)
                for name in names
                if name == "metrics.csv"
            ]
            return bool(files) and len(files[0].read_text().splitlines()) > step

        assert within(timeout_s, there), self.output + self.errors

    @property
    def errors(self) -> str:
        return (self.cwd / "stderr.txt").read_text()

    def family(self) -> dict[int, str]:
        """Every process that this run's ranks are or have started: pid -> command line."""
        return processes_with(f"FOLDPIPE_PARENT={self.process.pid}")

    def ranks(self) -> dict[int, int]:
        """Rank -> pid."""
        named = {pid for pid, command in self.family().items() if "launcher.rank.worker" in command}
        # A process that loads data for one is named as it is.
        found: dict[int, int] = {}
        for pid in named:
            with contextlib.suppress(OSError):  # It has ended meanwhile.
                if parent(pid) not in named:
                    found[int(_variable(pid, "RANK") or -1)] = pid
        return found

    def rank(self, number: int) -> int:
        """The pid of a rank."""
        return self.ranks()[number]

    def finish(self, timeout_s: float) -> Finished:
        code = self.process.wait(timeout_s)
        return Finished(code, self.output, self.errors, self.cwd)

    def end(self) -> None:
        """Whatever the test has found: nothing of it stays."""
        for pid in [self.process.pid, *self.family()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()
        self._errors.close()


def _hears_everything() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def started(words: Sequence[str], cwd: Path, *, terminal: int | None = None) -> Iterator[Started]:
    """A run that goes on, and certainly ends with the block."""
    run = Started(words, cwd, terminal=terminal)
    try:
        yield run
    finally:
        run.end()


def processes_with(assignment: str) -> dict[int, str]:
    """Living processes whose environment has ``NAME=value``: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if assignment.encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace")
    return found


def parent(pid: int) -> int:
    """The pid of the process that has started this one."""
    text = (Path("/proc") / str(pid) / "stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def _variable(pid: int, name: str) -> str | None:
    for item in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0"):
        key, _, value = item.partition(b"=")
        if key == name.encode():
            return value.decode()
    return None


def within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    """Whether the condition came true in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def read_result(folder: Path) -> dict[str, Any]:
    """``result.json``, which must be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"result.json has {constant}")

    found = json.loads((folder / "result.json").read_text(), parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def read_metrics(folder: Path) -> list[dict[str, float | None]]:
    """The rows of ``metrics.csv``; empty cells are None."""
    with (folder / "metrics.csv").open(newline="") as stream:
        return [
            {name: float(cell) if cell else None for name, cell in row.items()}
            for row in csv.DictReader(stream)
        ]
