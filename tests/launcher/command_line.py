"""The command line inside this process: with a recorder in place of the commands, or whole."""

from __future__ import annotations

import contextlib
import io
import math
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher.__main__ import COMMANDS, main
from launcher.config import LaunchConfig
from tests.launcher.runs import Finished


class Call(NamedTuple):
    config: LaunchConfig
    run_dir: Path


@dataclass
class Done:
    code: int
    output: str
    errors: str
    folder: Path
    calls: list[Call] = field(default_factory=list)

    def assert_refused(self) -> None:
        """Exit code 2, one message, nothing started and nothing left behind."""
        assert self.code == 2, self.errors
        assert self.calls == []
        assert self.output == ""
        assert self.errors.startswith("error: ")
        assert self.errors.count("\n") == 1
        assert len(self.errors) < 1200
        assert "Traceback" not in self.errors
        assert list(self.folder.iterdir()) == []


def run_here(
    words: Sequence[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[[LaunchConfig, Path], int] = lambda config, run_dir: 0,
) -> Done:
    """``python -m launcher *words`` in ``folder``; ``command`` stands for all modes."""
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    calls: list[Call] = []

    def record(config: LaunchConfig, run_dir: Path) -> int:
        calls.append(Call(config, run_dir))
        return command(config, run_dir)

    modules: dict[str, types.ModuleType] = {}
    for place in COMMANDS.values():
        name, _, function = place.partition(":")
        module = modules.setdefault(name, types.ModuleType(name))
        setattr(module, function or "run", record)
        monkeypatch.setitem(sys.modules, name, module)
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(words)
    return Done(code, output.getvalue(), errors.getvalue(), folder, calls)


def launch_here(words: Sequence[str], folder: Path) -> Finished:
    """``python -m launcher *words`` in ``folder``, to its end: for modes that start no rank."""
    folder.mkdir(parents=True, exist_ok=True)
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = main(words)
    return Finished(code, output.getvalue(), errors.getvalue(), folder)


def refused_here(
    words: Sequence[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    limit_s: float = math.inf,
) -> str:
    """The one message of a request that is refused with exit code 2.

    In ``limit_s`` seconds of CPU at most, before a process is started or a file is written.
    """

    def start_nothing(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    before = sorted(folder.rglob("*"))
    begin = time.process_time()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", start_nothing)
        done = launch_here(words, folder)
    assert time.process_time() - begin < limit_s
    assert done.code == 2, done.errors + done.output
    assert done.errors.startswith("error: ")
    assert done.errors.count("error: ") == 1
    assert "Traceback" not in done.errors
    assert done.output == ""
    assert sorted(folder.rglob("*")) == before
    return done.errors
