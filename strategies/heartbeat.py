"""What a rank is doing, in memory that somebody else reads when it cannot say so any more.

A rank writes one machine word per instruction into a page that it shares with a watching process:
no system call, no thread, no clock. The page outlives the rank, and whoever watches notices by
itself when the word has not changed for too long. Behind the page lie the names of the
instructions, written once per program.

    word   STATE     place of the instruction * 2 (+ 1 while it waits for a message), or a Phase
           STEP      the optimizer step that is being made, from 1
           PASSES    programs begun
           FRESH     1 while a program runs for the first time: it may compile and connect
           NAMES     place << 32 | bytes of the running program's instruction names: one word, so
                     that no reader sees the place of one program and the length of another
           LEAVE     written by the watching process: the next SIGTERM means to end at once
           WATCH_MS  the deadline that the rank's configuration asks for
           NOTE_AT, NOTE_BYTES      where a text for the watching process lies: the run's folder
           OTHERS_AT, OTHERS_BYTES  where it is said on which hosts all ranks are, if on several
           END_AT, END_BYTES        why the rank ends, which a full disk may keep from its files

Free of torch: the reader is a parent that must survive whatever a rank does.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

PAGE = 4096
STATE, STEP, PASSES, FRESH, NAMES = range(5)
LEAVE, WATCH_MS, NOTE_AT, NOTE_BYTES, OTHERS_AT, OTHERS_BYTES, END_AT, END_BYTES = range(5, 13)
_WORDS = 13
PHASE = 1 << 62  # in STATE: what follows is a Phase, no place
WAITING = 1


class Phase(IntEnum):
    """Where a rank is outside a program."""

    STARTING = 0
    JOINING = 1
    SETTING_UP = 2
    BETWEEN = 3
    SENDING = 4
    SHARING = 5
    REDUCING = 6
    UPDATING = 7
    SAVING = 8


_PHASES = {
    Phase.STARTING: "starting: imports and data",
    Phase.JOINING: "waiting for the other ranks to join",
    Phase.SETTING_UP: "setting up model and data",
    Phase.BETWEEN: "between two passes: data, callbacks, logging",
    Phase.SENDING: "waiting for its last messages to be received",
    Phase.SHARING: "sharing loss and logs with all ranks of its pipeline",
    Phase.REDUCING: "waiting for gradients to be reduced",
    Phase.UPDATING: "in the optimizer's update",
    Phase.SAVING: "writing a checkpoint",
}
# Those in which a rank waits for others, and says for whom.
_WAITING_PHASES = frozenset({Phase.SENDING, Phase.SHARING, Phase.REDUCING, Phase.JOINING})


@dataclass(frozen=True, slots=True)
class Beat:
    """What a page says.

    Attributes:
        step: Optimizer step that is being made, from 1; 0 before the first.
        doing: The instruction in words, or the phase.
        peers: Global ranks for which it waits or may wait.
        waiting: Whether it waits for others, and computes nothing.
        in_pass: Whether it runs a program that it has run before, or flushes one: then nothing
            but other ranks should keep it from going on.
        mark: Changes whenever the rank goes on.
        where: The peers in words, with their hosts where these are others.
        between: Whether it is between two passes: its loader, its callbacks or its loggers run.
    """

    step: int
    doing: str
    peers: tuple[int, ...]
    waiting: bool
    in_pass: bool
    mark: tuple[int, int]
    where: str = ""
    between: bool = False

    def describe(self) -> str:
        """``at step 3 in RECV act mb=3 from stage 2 (rank 2 on node1)``."""
        peers = f" ({self.where})" if self.where else ""
        return (f"at step {self.step} " if self.step else "") + f"in {self.doing}{peers}"


class Heartbeat:
    """The page of one rank, as the rank writes it; hot loops write ``words[STATE]`` themselves."""

    def __init__(self, file: int | None = None) -> None:
        """Maps a page: a descriptor from ``new_page``; None for a page that nobody reads."""
        self._file = file
        self._texts = b""  # where nobody else reads them
        memory: bytearray | mmap.mmap = bytearray(PAGE) if file is None else mmap.mmap(file, PAGE)
        self.words = memoryview(memory).cast("Q")
        if file is None:
            self.phase(Phase.STARTING)

    def names(self, names: Sequence[tuple[str, tuple[int, ...], str]]) -> tuple[int, int]:
        """Lays the names of a program's instructions behind the page; ``begin`` wants the result.

        Per place the instruction in words, the global ranks at its other end, and these in words.
        """
        return self._lay(json.dumps(names))

    def begin(self, where: tuple[int, int], *, fresh: bool) -> None:
        """A pass begins: where its names lie, and whether it is the program's first."""
        words = self.words
        words[NAMES] = where[0] << 32 | where[1]
        words[FRESH] = int(fresh)
        words[PASSES] += 1

    def phase(self, phase: Phase) -> None:
        self.words[STATE] = PHASE | phase

    def step(self, step: int) -> None:
        """The optimizer step that is being made, from 1."""
        self.words[STEP] = step

    def tell(self, note: str, *, watch_s: float) -> None:
        """Tells the watching process what it cannot know: the run's folder, the deadline."""
        self.words[WATCH_MS] = round(watch_s * 1000)
        # Last: who reads the page takes both as soon as the note has a length, and once.
        self.words[NOTE_AT], self.words[NOTE_BYTES] = self._lay(note)

    def others(self, text: str) -> None:
        """Says on which hosts all ranks are: for reports of a rank that waits for all of them."""
        self.words[OTHERS_AT], self.words[OTHERS_BYTES] = self._lay(text)

    def end(self, text: str) -> None:
        """Says why the rank ends."""
        self.words[END_AT], self.words[END_BYTES] = self._lay(text)

    @property
    def told_to_leave(self) -> bool:
        """Whether the watching process is ending this rank."""
        return bool(self.words[LEAVE])

    def beat(self) -> Beat:
        if self._file is None:
            return _beat(self.words, lambda size, at: self._texts[at : at + size])
        return _beat(self.words, partial(os.pread, self._file))

    def _lay(self, text: str) -> tuple[int, int]:
        data = text.encode()
        if self._file is None:
            at = len(self._texts)
            self._texts += data
            return at, len(data)
        # Behind what others in this process have laid there.
        at = os.fstat(self._file).st_size
        os.pwrite(self._file, data, at)
        return at, len(data)


def new_page() -> int:
    """A descriptor for a fresh page: memory, which no full disk and no folder can take away."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("heartbeat")
    else:
        file, name = tempfile.mkstemp(prefix="heartbeat")
        os.unlink(name)
    os.write(file, bytes(PAGE))
    os.pwrite(file, (PHASE | Phase.STARTING).to_bytes(8, sys.byteorder), STATE * 8)
    return file


def read_beat(file: int) -> Beat:
    """What a rank has last written, also after its end."""
    return _beat(_words(file), partial(os.pread, file))


def read_mark(file: int) -> tuple[int, int]:
    """``Beat.mark`` alone: what is looked at all the time."""
    words = _words(file)
    return words[PASSES], words[STATE]


def read_note(file: int) -> tuple[str | None, float]:
    """What ``Heartbeat.tell`` has told: note and deadline in seconds; None before that."""
    words = _words(file)
    if not words[NOTE_BYTES]:
        return None, 0.0
    return os.pread(file, words[NOTE_BYTES], words[NOTE_AT]).decode(), words[WATCH_MS] / 1000


def read_end(file: int) -> str:
    """What ``Heartbeat.end`` has said; empty if nothing."""
    words = _words(file)
    return os.pread(file, words[END_BYTES], words[END_AT]).decode() if words[END_BYTES] else ""


def tell_to_leave(file: int) -> None:
    """From now on SIGTERM ends the rank at once, without a checkpoint."""
    os.pwrite(file, (1).to_bytes(8, sys.byteorder), LEAVE * 8)


def _words(file: int) -> memoryview:
    return memoryview(os.pread(file, _WORDS * 8, 0)).cast("Q")


def _beat(words: memoryview, read: Callable[[int, int], bytes]) -> Beat:
    state, step, passes = words[STATE], words[STEP], words[PASSES]
    mark = (passes, state)
    used = not words[FRESH]
    if state & PHASE:
        phase = Phase(state & ~PHASE)
        waiting = phase in _WAITING_PHASES
        flushes = phase in (Phase.SENDING, Phase.SHARING, Phase.REDUCING, Phase.UPDATING)
        others = ""
        if waiting and words[OTHERS_BYTES]:
            others = read(words[OTHERS_BYTES], words[OTHERS_AT]).decode()
        between = phase is Phase.BETWEEN
        return Beat(step, _PHASES[phase], (), waiting, flushes and used, mark, others, between)
    place, waiting = state >> 1, bool(state & WAITING)
    at, size = divmod(words[NAMES], 1 << 32)
    if not size:
        return Beat(step, f"instruction {place}", (), waiting, used, mark)
    names = json.loads(read(size, at))
    doing, peers, where = names[place] if place < len(names) else (f"instruction {place}", (), "")
    return Beat(step, doing, tuple(peers), waiting, used, mark, where)
