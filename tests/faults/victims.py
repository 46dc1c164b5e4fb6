"""Ranks of a running job, looked at and hit in the instruction that a test wants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from strategies.heartbeat import Beat, read_beat
from tests.launcher.runs import Started


class Victim:
    """One rank.

    Attributes:
        pid: Its process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        proc = Path("/proc") / str(pid)
        given = dict(
            item.partition("=")[::2]
            for item in (proc / "environ").read_bytes().decode().split("\0")
        )
        # The page that its parent watches, opened anew.
        self._page = os.open(proc / "fd" / given["FOLDPIPE_HEARTBEAT"], os.O_RDONLY)

    def close(self) -> None:
        os.close(self._page)

    @property
    def beat(self) -> Beat:
        return read_beat(self._page)

    def stop_in(self, wanted: Callable[[Beat], bool], timeout_s: float = 20) -> Beat:
        """Sends SIGSTOP in an instruction of one's choice; returns what it was doing."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if not wanted(self.beat):
                continue
            os.kill(self.pid, signal.SIGSTOP)
            _until_stopped(self.pid)
            beat = self.beat
            if wanted(beat):
                return beat
            os.kill(self.pid, signal.SIGCONT)  # It has gone on in between.
            time.sleep(0.002)
        raise AssertionError(f"never seen there; now {self.beat}")

    def kill_in(self, wanted: Callable[[Beat], bool]) -> Beat:
        """Sends SIGKILL there."""
        beat = self.stop_in(wanted)
        os.kill(self.pid, signal.SIGKILL)
        return beat


def victim(run: Started, rank: int) -> Victim:
    """A rank of a run, once it is there."""
    return Victim(run.rank(rank))


def forward(beat: Beat) -> bool:
    return beat.doing.startswith("F ")


def backward(beat: Beat) -> bool:
    return beat.doing.startswith("B ")


def receiving(beat: Beat) -> bool:
    return beat.doing.startswith("RECV ")


def reducing(beat: Beat) -> bool:
    return beat.doing == "waiting for gradients to be reduced"


def _until_stopped(pid: int) -> None:
    while _state(pid) not in "TZ":
        time.sleep(0.0005)


def _state(pid: int) -> str:
    text = (Path("/proc") / str(pid) / "stat").read_text()
    return text.rpartition(")")[2].split()[0]
