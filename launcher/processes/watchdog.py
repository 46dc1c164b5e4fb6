"""Ranks that live and do not go on: one that was stopped, or one for which others wait in vain.

Looks at the heartbeats of this host's ranks and at what the kernel says of their processes. Being
slow is no fault: a rank may take as long as it likes to start, to compile (the first pass of a
program), to load data, to validate or to write a checkpoint; only time-outs of messages limit that.
A rank whose process is stopped, or that sits in one instruction of a program that it has run before
while others wait for it, is reported after the deadline. A process that a debugger holds is not.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
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
from launcher.terminal import say_error
from strategies.heartbeat import (
    Beat,
    Heartbeat,
    new_page,
    read_beat,
    read_mark,
    read_note,
    tell_to_leave,
)

# More than this between two looks, and this process itself has not run: nobody is to blame.
_OWN_GAP_S = 2.0
_RESTING_S = 0.2
_WARNED_S = 30.0


class State(Enum):
    """What the kernel says of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank that does not go on: its index on this host, a signal's name or ``no progress``."""

    index: int
    kind: str
    message: str


@dataclass
class Watchdog:
    """Watches the ranks of one host.

    Attributes:
        first_rank: Global rank of the first of them.
        deadline_s: For a stopped process, and for a rank in one instruction; 0 for never.
        patience_s: For a rank in one instruction where that is more: compiled code may be compiled
            again, and a GPU's host waits for many instructions at once.
        data_s: For ranks that all stand between two passes, where nobody waits for a message: a
            loader whose file system is gone, a callback that never returns; 0 for never.
        warn: Told once, well before, that this is so.
    """

    pages: Pages
    deadline_s: float
    states: Callable[[int], State]
    first_rank: int = 0
    patience_s: float = 0.0
    data_s: float = 0.0
    warn: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    _gap: tuple[float, float] = (0.0, 0.0)
    _looked: float | None = None
    _warned: bool = False
    _stopped: dict[int, float] = field(default_factory=dict)
    _since: dict[int, tuple[tuple[int, int], float]] = field(default_factory=dict)

    def look(self) -> Stall | None:
        """Call it often; the first rank that has exceeded the deadline, or None."""
        now = self._come_back()
        for index in range(len(self.pages.files)):
            mark = self.pages.mark(index)
            if index not in self._since or self._since[index][0] != mark:
                self._since[index] = mark, now
        found = self._without_data(now)
        if found is not None or not self.deadline_s:
            return found
        return self._stopped_one(now) or self._waited_for(now)

    def _come_back(self) -> float:
        """The time now; forgets what was seen before this process itself has not run for long."""
        now = self.clock()
        if self._looked is not None and now - self._looked > _OWN_GAP_S:
            # Suspended ourselves, or starved: what was seen before says nothing.
            self._stopped.clear()
            self._since.clear()
            self._gap = now, now - self._looked
        self._looked = now
        return now

    def paused_s(self, within_s: float) -> float:
        """How long this process has not run; 0 where it has come back longer ago than that."""
        now = self._come_back()
        ended, took = self._gap
        return took if took and now - ended <= within_s else 0.0

    def _without_data(self, now: float) -> Stall | None:
        count = len(self.pages.files)
        idle = min((now - self._since[index][1] for index in range(count)), default=0.0)
        if idle < _WARNED_S and (not self.data_s or idle < self.data_s):
            self._warned = False
            return None
        beats = [self.pages.beat(index) for index in range(count)]
        if not all(beat.between for beat in beats):
            return None
        what = (
            f"no rank has gone on for {idle:.0f} s: all are between two steps, so a loader "
            "or a callback has not come back"
        )
        if self.data_s and idle >= self.data_s:
            return Stall(0, "no data", f"{what} (trainer.data_timeout_s={self.data_s:g})")
        if not self._warned:
            self._warned = True
            self.warn(f"warning: {what} yet")
        return None

    def idle_s(self, index: int) -> float:
        """For how long a rank has not gone on."""
        known = self._since.get(index)
        return 0.0 if known is None else self.clock() - known[1]

    def _stopped_one(self, now: float) -> Stall | None:
        for index in range(len(self.pages.files)):
            # One that goes on is not asked for: the kernel's answer takes longer than its mark.
            resting = now - self._since[index][1] >= _RESTING_S
            if not resting or self.states(index) is not State.STOPPED:
                self._stopped.pop(index, None)
                continue
            stopped_s = now - self._stopped.setdefault(index, now)
            if stopped_s >= self.deadline_s:
                return Stall(
                    index,
                    "SIGSTOP",
                    f"its process has been stopped for {stopped_s:.1f} s "
                    f"(trainer.watchdog_s={self.deadline_s:g})",
                )
        return None

    def _waited_for(self, now: float) -> Stall | None:
        limit = max(self.deadline_s, self.patience_s)
        for index in range(len(self.pages.files)):
            if now - self._since[index][1] < limit:
                continue
            beat = self.pages.beat(index)
            if not beat.waiting:
                continue
            chain = self._chain(index, beat)
            if any(self.states(link) is not State.RUNNING for link in chain):
                continue  # a stopped one has a deadline of its own, a debugged one none
            found = chain[0] if self.pages.beat(chain[-1]).waiting else chain[-1]
            culprit = self.pages.beat(found)
            idle = now - self._since[found][1]
            if not culprit.in_pass or idle < limit:
                continue
            waits = (
                "waits itself, so a message is lost" if culprit.waiting else "others wait for it"
            )
            return Stall(
                found,
                "no progress",
                f"it has not gone on for {idle:.1f} s and {waits} "
                f"(trainer.watchdog_s={self.deadline_s:g})",
            )
        return None

    def _chain(self, index: int, beat: Beat) -> list[int]:
        """Follows who waits for whom, to one that waits for nobody, or until nobody is new."""
        seen = [index]
        while beat.waiting:
            others = self._local(beat.peers) or range(len(self.pages.files))
            fresh = [other for other in others if other not in seen]
            if not fresh:
                break
            # Of several, one that does not wait itself.
            beats = {other: self.pages.beat(other) for other in fresh}
            index = min(fresh, key=lambda other: (beats[other].waiting, self._since[other][1]))
            beat = beats[index]
            seen.append(index)
        return seen

    def _local(self, ranks: Sequence[int]) -> list[int]:
        indices = (rank - self.first_rank for rank in ranks)
        return [index for index in indices if 0 <= index < len(self.pages.files)]


def state_of(pid: int) -> State:
    import psutil  # Not needed to read a configuration.

    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return State.GONE
    if status == psutil.STATUS_STOPPED:
        return State.STOPPED
    if status == psutil.STATUS_TRACING_STOP:
        return State.TRACED
    return State.GONE if status == psutil.STATUS_ZOMBIE else State.RUNNING


# The heartbeat pages of this host's ranks: made before they start, handed to them, read later.

_VARIABLE = "FOLDPIPE_HEARTBEAT"


@dataclass(frozen=True, slots=True)
class Pages:
    """One heartbeat page per rank; descriptors, to be passed on to the ranks."""

    files: Sequence[int]

    @classmethod
    def make(cls, count: int) -> Pages:
        """Fresh ones; ``close`` gives them back."""
        return cls(tuple(new_page() for _ in range(count)))

    def variables(self, index: int) -> dict[str, str]:
        return {_VARIABLE: str(self.files[index])}

    def beat(self, index: int) -> Beat:
        return read_beat(self.files[index])

    def mark(self, index: int) -> tuple[int, int]:
        """Changes whenever the rank goes on; cheaper than ``beat``."""
        return read_mark(self.files[index])

    def tell_to_leave(self) -> None:
        """From now on SIGTERM ends the ranks at once."""
        for file in self.files:
            tell_to_leave(file)

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def own_heartbeat(environment: Mapping[str, str]) -> Heartbeat:
    """This rank's page, or one that nobody reads where no process watches it."""
    known = environment.get(_VARIABLE)
    return Heartbeat(None if known is None else int(known))


# --------------------------------------------------------------------------------------------------
# A parent for a rank that srun or torchrun has started: small, torch-free, and there to the end.
#
# ``cluster=local`` has a parent that watches all ranks. Elsewhere every process forks before it
# imports anything heavy: the child becomes the rank, and the parent watches its heartbeat. It
# writes down how a rank has ended that could not say so, with the instruction it was in, ends one
# that is stopped, and passes on signals; that of rank 0 keeps the store where all ranks meet.
# Ending the other ranks is the scheduler's part (``srun --kill-on-bad-exit``, torchrun); ranks that
# wait for each other across machines are limited by ``cluster.timeout_s``, because no guardian sees
# more than its own rank.
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
