"""Runs the tests of one mutant after the other, each in a fork of a process that has collected all.

What a fork has imported is without the mutant: functions of its file get the code that they have
in the source as it stands now. So a mutant is a line of a function. Processes that tests start read
the file itself. Nothing of this tree but the tests and what they import is imported here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest

KILLED, SURVIVED = "killed", "SURVIVED"
CRASHED, ENDLESS = "killed by a crash", "NOT ENDED within the time limit"
NO_FUNCTION = "NOT SEEN: no function that its tests have imported has changed"
NO_CODE = "NOT RUN: the file cannot be compiled"
_WORDS = {0: SURVIVED, 1: KILLED, 3: NO_FUNCTION, 4: NO_CODE}
_CODES = {word: code for code, word in _WORDS.items()}


class Server:
    """In place of pytest's own loop: runs what is asked for on a channel."""

    def __init__(self, channel: int, told: Path) -> None:
        self._channel = socket.socket(fileno=channel).makefile("rw", encoding="utf-8")
        self._told = told
        self._functions: dict[str, list[FunctionType]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("tests could not be collected")
        self._find_functions(session.config.rootpath)
        for line in self._channel:
            names, file, limit_s = json.loads(line)
            begin = time.monotonic()
            child = os.fork()
            if child == 0:
                _end(functools.partial(self._run, session, names, file))
            word = _word_of(child, begin + limit_s)
            print(json.dumps([word, time.monotonic() - begin]), file=self._channel, flush=True)
        return True

    def _find_functions(self, root: Path) -> None:
        gc.unfreeze()  # What is frozen is not listed.
        for thing in gc.get_objects():
            # By `type`: proxies answer `isinstance` with code of their own.
            if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(root)):
                self._functions.setdefault(thing.__code__.co_filename, []).append(thing)
        gc.freeze()

    def _run(self, session: pytest.Session, names: list[str], file: str) -> str:
        try:
            changed = not file or self._replace(session.config.rootpath / file)
        except SyntaxError:
            return NO_CODE
        # A name is that of a test, of all cases of one, or of a file.
        items = [
            item for item in session.items
            if any(item.nodeid == name or item.nodeid.startswith((f"{name}[", f"{name}::"))
                   for name in names)
        ]  # fmt: skip
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return KILLED
        # Without a function that has changed, only processes that tests start have seen it.
        return SURVIVED if changed else NO_FUNCTION

    def _replace(self, path: Path) -> bool:
        """Whether functions have other code now, that of the file as it is.

        A module that nobody has imported yet is imported from that file.
        """
        new = {_place(code): code for code in _codes(path)}
        changed = str(path) not in self._functions
        for function in self._functions.get(str(path), ()):
            code = new.get(_place(function.__code__))
            if code is not None and code != function.__code__:
                function.__code__ = code
                changed = True
        if changed:
            gc.unfreeze()
            for thing in gc.get_objects():
                if type(thing) is functools._lru_cache_wrapper:
                    thing.cache_clear()
        return changed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._told.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n")


def _codes(path: Path) -> Iterator[CodeType]:
    waiting = [compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _end(run: functools.partial[str]) -> None:
    """Ends this process with what its tests come to, and what they have started with it."""
    os.setsid()
    code = 1
    try:
        code = _CODES[run()]
        atexit._run_exitfuncs()
    except BaseException as error:  # A mutant may raise anything, also from a hook of pytest.
        print(repr(error), file=sys.stderr)
    finally:
        os._exit(code)


def _word_of(child: int, deadline: float) -> str:
    """How a process has ended, whose group ends with it."""
    word = ENDLESS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            word = _WORDS.get(os.waitstatus_to_exitcode(status), CRASHED)
            break
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if word == ENDLESS:
        os.waitpid(child, 0)
    return word


def main(channel: int, told: Path, tests: list[str]) -> int:
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu and not slurm"]
    return int(pytest.main([*options, *tests], plugins=[Server(channel, told)]))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
