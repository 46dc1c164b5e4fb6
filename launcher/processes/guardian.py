"""A parent for a rank that srun or torchrun has started: small, torch-free, and there to the end.

``cluster=local`` has a parent that watches all ranks. Elsewhere every process forks before it
imports anything heavy: the child becomes the rank, and the parent watches its heartbeat. It writes
down how a rank has ended that could not say so, with the instruction it was in, ends one that is
stopped, and passes on signals; that of rank 0 keeps the store where all ranks meet. Ending the
other ranks is the scheduler's part (``srun --kill-on-bad-exit``, torchrun); ranks that wait for
each other across machines are limited by ``cluster.timeout_s``, because no guardian sees more than
its own rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from launcher.processes.failure import (
    Failure,
    OomCount,
    describe,
    failure_file,
    read_failure,
    signalled,
)
from launcher.processes.store import serve_for_good
from launcher.processes.watchdog import Pages, Stall, State, Watchdog, state_of
from launcher.terminal import say_error
from strategies.heartbeat import read_note

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGCONT)


def fork_under_guard(rank: int, store: tuple[socket.socket, str] | None = None) -> None:
    """Forks; returns in the child, which becomes the rank. The parent ends with its exit code.

    ``store``: what the parent keeps for all ranks meanwhile: where it listens, and its token.
    """
    pages = Pages.make(1)
    os.environ.update(pages.variables(0))
    parent = os.getpid()
    # One that came to the parent before it passes signals on would reach nobody.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child:
        if store is not None:
            serve_for_good(*store)
        _Guardian(rank, child, pages).watch(before)
    if store is not None:
        store[0].close()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Guardian:
    def __init__(self, rank: int, child: int, pages: Pages) -> None:
        self._rank = rank
        self._child = child
        self._pages = pages
        self._oom = OomCount()
        # Whoever it waits for is out of sight: only being stopped counts.
        self._watchdog = Watchdog(pages, 0.0, self._state, rank, patience_s=math.inf)
        self._run_dir: Path | None = None

    def watch(self, unblocked: set[signal.Signals | int]) -> None:
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        while True:
            found, status = os.waitpid(self._child, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                if code < 0 or read_failure(self._where(), self._rank) is not None:
                    self._note_end(code)
                os._exit(128 - code if code < 0 else code)
            self._listen()
            stall = self._watchdog.look()
            if stall is not None:
                self._end(stall)
            time.sleep(_POLL_S)

    def _pass_on(self, number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _listen(self) -> None:
        if self._run_dir is None:
            note, deadline_s = read_note(self._pages.files[0])
            if note is not None:
                self._run_dir = Path(note)
                self._watchdog.deadline_s = deadline_s

    def _where(self) -> Path:
        self._listen()
        return self._run_dir or Path(os.devnull)

    def _state(self, _: int) -> State:
        return state_of(self._child)

    def _note_end(self, code: int) -> None:
        said = read_failure(self._where(), self._rank)
        self._write(said or self._oom.explain(signalled(self._rank, code, time.time())))

    def _end(self, stall: Stall) -> None:
        beat = self._pages.beat(0)
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        host = socket.gethostname()
        # As one that was killed: what the others say is a consequence of this.
        failure = Failure(self._rank, host, time.time(), stall.kind, stall.message, -signal.SIGSTOP)
        self._write(replace(failure, doing=beat.describe(), step=beat.step))
        os._exit(1)

    def _write(self, failure: Failure) -> None:
        if not failure.doing:
            beat = self._pages.beat(0)
            failure = replace(failure, doing=beat.describe(), step=beat.step)
        where = self._where()
        with contextlib.suppress(OSError):  # the folder may be on another machine
            failure_file(where, self._rank).write_text(json.dumps(asdict(failure)))
        if failure.exit_code < 0:
            # It could not say so itself.
            log = where / "logs" / f"rank_{self._rank:05d}.log"
            say_error(describe(failure, log))
            sys.stderr.flush()
