"""Ranks as processes of this machine: started together, watched, and never left behind.

The parent imports no torch and takes part in no communication, so it survives whatever a rank does.
Each rank is the leader of a session of its own: Ctrl-C reaches the parent alone, which then ends
all of them; a rank also dies with its parent (``launcher.worker`` asks the kernel for that).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.processes.failure import (
    Failure,
    describe,
    failure_file,
    first_failure,
    read_failure,
    signalled,
)
from launcher.processes.preempted import PREEMPTED
from strategies.errors import RunError

_POLL_S = 0.1
_GRACE_S = 1.0  # for peers of a failed rank to leave their own word
_TERM_S = 2.5  # between SIGTERM and SIGKILL

Listener = Callable[[dict[str, Any]], None]


@dataclass
class LocalRanks:
    """``world_size`` workers of one run.

    Attributes:
        run_dir: Has resolved.json; logs go to its logs/.
        world_size: Number of ranks.
        on_event: Gets rank 0's progress events.
        threads: Of each rank; None for its share of the cores.
    """

    run_dir: Path
    world_size: int
    on_event: Listener
    threads: int | None = None
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _buffer: bytes = b""
    _training: bool = False
    _asked_to_stop: bool = False
    _killed: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Starts the ranks and returns when all have ended well.

        Raises:
            RunError: A rank failed; names the first one.
            KeyboardInterrupt: After all ranks have been ended.
        """
        (self.run_dir / "logs").mkdir(exist_ok=True)
        for rank in range(self.world_size):  # of an earlier run in the same folder
            failure_file(self.run_dir, rank).unlink(missing_ok=True)
        reader, writer = os.pipe()
        try:
            with _termination_as_interrupt(), self._stop_passed_on():
                try:
                    self._start(writer)
                    os.close(writer)
                    writer = -1
                    self._watch(reader)
                finally:
                    self._end_all()
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)

    @contextmanager
    def _stop_passed_on(self) -> Iterator[None]:
        """SIGUSR1 to the parent asks the ranks to stop with a checkpoint."""

        def pass_on(*_: object) -> None:
            self._asked_to_stop = True
            self._ask_ranks()

        before = signal.signal(signal.SIGUSR1, pass_on)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    def _ask_ranks(self) -> None:
        # Not before training: a rank that is only starting would die of it.
        if self._asked_to_stop and self._training:
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGUSR1)

    def _start(self, writer: int) -> None:
        port = _free_port()
        for rank in range(self.world_size):
            log = self.log_file(rank).open("wb")
            with log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "launcher.worker", str(self.run_dir)],
                        env=self._environment(rank, port, writer if rank == 0 else None),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        pass_fds=(writer,) if rank == 0 else (),
                        start_new_session=True,
                    )
                )

    def _environment(self, rank: int, port: int, events: int | None) -> dict[str, str]:
        environment = dict(os.environ)
        threads = self.threads or max(1, (os.cpu_count() or 1) // self.world_size)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        # Lightning's metrics import matplotlib where it is installed, which leaves a font cache.
        cache = Path(tempfile.gettempdir()) / f"foldpipe-matplotlib-{os.getuid()}"
        environment.setdefault("MPLCONFIGDIR", str(cache))
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self.world_size),
            NODE_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            FOLDPIPE_PARENT=str(os.getpid()),
            PYTHONUNBUFFERED="1",
        )
        # Workers must find the same code that started them, also from a checkout.
        root = str(Path(__file__).resolve().parents[2])
        known = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(part for part in (root, known) if part)
        if events is not None:
            environment["FOLDPIPE_EVENTS"] = str(events)
        return environment

    def log_file(self, rank: int) -> Path:
        """``logs/rank_00003.log``."""
        return self.run_dir / "logs" / f"rank_{rank:05d}.log"

    def _watch(self, reader: int) -> None:
        os.set_blocking(reader, False)
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            open_pipe = True
            while True:
                if open_pipe:
                    if selector.select(_POLL_S):
                        open_pipe = self._read(reader)
                else:
                    time.sleep(_POLL_S)
                codes = [process.poll() for process in self._processes]
                if any(code not in (None, 0, PREEMPTED) for code in codes):
                    if open_pipe:
                        self._read(reader)
                    raise self._failed()
                if None not in codes:  # whether preempted or done, the outcome tells
                    if open_pipe:
                        self._read(reader)
                    return

    def _read(self, reader: int) -> bool:
        """Hands on complete lines; False when the writer is gone."""
        while True:
            try:
                data = os.read(reader, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                self.on_event(event)
                if event["kind"] == "start":
                    self._training = True
                    self._ask_ranks()

    def _failed(self) -> RunError:
        """Waits a moment for the other ranks' words, then names the first failure."""
        seen: dict[int, float] = {}
        until = time.monotonic() + _GRACE_S
        while True:
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    seen.setdefault(rank, time.time())
            if len(seen) == self.world_size or time.monotonic() > until:
                break
            time.sleep(_POLL_S / 4)
        failures: list[Failure] = []
        for rank, at in seen.items():
            code = self._processes[rank].returncode
            if code:
                failure = read_failure(self.run_dir, rank)
                failures.append(failure or signalled(rank, code, at))
        failure = first_failure(failures)
        return RunError(describe(failure, self.log_file(failure.rank)))

    def _end_all(self) -> None:
        """Ends what still runs: SIGTERM, then SIGKILL to whole sessions."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            _signal_session(process, signal.SIGTERM)
        until = time.monotonic() + _TERM_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self._processes:
            # Also after a clean end: loader processes of a killed rank may be left.
            _signal_session(process, signal.SIGKILL)
            process.wait()


def _signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM to the parent ends the ranks just as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
