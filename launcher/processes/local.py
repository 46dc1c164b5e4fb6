"""Ranks as processes of this machine: started together, watched, and never left behind.

The parent imports no torch and takes part in no communication, so it survives whatever a rank does.
Each rank is the leader of a session of its own: Ctrl-C reaches the parent alone, which then ends
all of them; a rank also dies with its parent (``launcher.rank.worker`` asks the kernel for that),
be that this process or the one that has forked it, which dies with this one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.processes.failure import (
    Failure,
    OomCount,
    RankFailedError,
    RankRefusedError,
    blame,
    describe,
    failure_file,
    failure_on,
    free_bytes,
    read_failure,
    signalled,
    timed_out,
    timed_out_earlier,
)
from launcher.processes.preempted import PREEMPTED, InterruptedRunError, PreemptedError
from launcher.processes.rank_server import RankProcess, RankServer
from launcher.processes.store import store_served
from launcher.processes.watchdog import Pages, Stall, State, Watchdog, state_of
from launcher.report.result import write_result
from launcher.report.typed_command import paste, typed_words
from launcher.resolve import num_cores
from launcher.terminal import complain

_POLL_S = 0.1
_GRACE_S = 1.0  # for peers of a failed rank to leave their own word
_TOGETHER_S = 2.0  # of two signals that ask for one end
_TERM_S = 1.0  # between SIGTERM, which a rank obeys at once if it can, and SIGKILL

Listener = Callable[[dict[str, Any]], None]


@dataclass
class LocalRanks:
    """``world_size`` workers of one run.

    Attributes:
        run_dir: Has resolved.json; logs go to its logs/.
        world_size: Number of ranks.
        on_event: Gets rank 0's progress events.
        environment: Of all ranks, see ``rank_environment``.
        server: What forks them; None to start each by itself.
        watch_s: Deadline of the watchdog; 0 for none.
        patience_s: See ``Watchdog``.
        data_s: See ``Watchdog``.
        saves: Whether ranks that are asked to stop write a checkpoint first.
        timeout_s: How long ranks wait for each other; a pause counts, as gloo's clock goes on.
        restarted: How often the ranks of this run have failed before; their logs go on.
    """

    run_dir: Path
    world_size: int
    on_event: Listener
    environment: Mapping[str, str]
    server: RankServer | None = None
    watch_s: float = 0.0
    patience_s: float = 0.0
    data_s: float = 0.0
    saves: bool = False
    timeout_s: float = math.inf
    restarted: int = 0
    _processes: list[RankProcess] = field(default_factory=list)
    _token: str = field(default_factory=lambda: secrets.token_hex(16))
    _buffer: bytes = b""
    _training: bool = False
    _asked_to_stop: signal.Signals | None = None
    _asked_at: float = 0.0
    _pages: Pages = field(default_factory=lambda: Pages(()))
    _oom: OomCount = field(default_factory=OomCount)

    def run(self) -> None:
        """Starts the ranks and returns when all have ended well.

        Raises:
            RankFailedError: A rank failed, or does not go on; names the first one.
            KeyboardInterrupt: After all ranks have been ended.
        """
        self._pages = Pages.make(self.world_size)
        try:
            self._run()
        finally:
            self._pages.close()

    def _run(self) -> None:
        (self.run_dir / "logs").mkdir(exist_ok=True)
        for rank in range(self.world_size):  # of an earlier run in the same folder
            failure_file(self.run_dir, rank).unlink(missing_ok=True)
        reader, writer = os.pipe()
        try:
            with self._stop_passed_on(), store_served(self._token) as port:
                try:
                    self._start(writer, port)
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
        """What asks the parent to end asks the ranks to stop with a checkpoint.

        All but SIGUSR1 end them at once where there is nothing to be saved: the ranks do not train,
        or not yet. So does a second one that means it: Ctrl-C again, or a SIGTERM some time after.
        What ends a session sends SIGTERM and SIGHUP together, and a shell SIGHUP as the terminal
        does. Ctrl-Z stops the ranks with the parent.
        """

        def pass_on(number: int, _: object) -> None:
            again = self._asked_to_stop is not None
            together = again and time.monotonic() - self._asked_at < _TOGETHER_S
            typed = number == self._asked_to_stop == signal.SIGINT
            if again and (number == signal.SIGHUP or (together and not typed)):
                return
            ends = again or not (self.saves and self._training)
            if number != signal.SIGUSR1 and ends:
                raise KeyboardInterrupt
            if not again:
                self._asked_at = time.monotonic()
            self._asked_to_stop = signal.Signals(number)
            if number == signal.SIGINT:
                complain("stopping after this step, with a checkpoint; Ctrl-C again: at once")
            self._ask_ranks()

        def pause(*_: object) -> None:
            for process in self._processes:
                _signal_session(process, signal.SIGSTOP)
            # Not SIGTSTP, which does nothing where no shell watches. Returns with `fg`.
            os.kill(os.getpid(), signal.SIGSTOP)
            for process in self._processes:
                _signal_session(process, signal.SIGCONT)

        handlers: dict[signal.Signals, Any] = {signal.SIGTSTP: pause}
        handlers |= dict.fromkeys(
            (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT), pass_on
        )
        # Under nohup, and in a shell's background, some are ignored, and shall be.
        ignored = [n for n in handlers if signal.getsignal(n) == signal.SIG_IGN]
        before = {n: signal.signal(n, h) for n, h in handlers.items() if n not in ignored}
        try:
            yield
        finally:
            for number, handler in before.items():
                # What ends a session sends it behind the signal that has stopped this run, which
                # has yet to write how it ended.
                late = number == signal.SIGHUP and self._asked_to_stop is not None
                signal.signal(number, signal.SIG_IGN if late else handler)

    def _ask_ranks(self) -> None:
        # Not before training: a rank that is only starting would die of it.
        if self._asked_to_stop is not None and self._training:
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(self._asked_to_stop)

    def _start(self, writer: int, port: int) -> None:
        for rank in range(self.world_size):
            log = self.log_file(rank).open("ab" if self.restarted else "wb")
            with log:
                if self.restarted:
                    log.write(f"--- restart {self.restarted} ---\n".encode())
                    log.flush()
                files = self._pages.variables(rank)
                if rank == 0:
                    files |= {"FOLDPIPE_EVENTS": str(writer)}
                variables = {**self.environment, **self._variables(rank, port)}
                self._processes.append(self._start_one(variables, log.fileno(), files))

    def _start_one(
        self, variables: Mapping[str, str], log: int, files: Mapping[str, str]
    ) -> RankProcess:
        descriptors = {name: int(file) for name, file in files.items()}
        if self.server is not None:
            return self.server.start(self.run_dir, variables, log, descriptors)
        return subprocess.Popen(
            our_python("launcher.rank.worker", str(self.run_dir)),
            env={**variables, **files},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            pass_fds=tuple(descriptors.values()),
            start_new_session=True,
        )

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "FOLDPIPE_STORE": self._token,
            "FOLDPIPE_PARENT": str(os.getpid()),
        }

    def log_file(self, rank: int) -> Path:
        """``logs/rank_00003.log``."""
        return self.run_dir / "logs" / f"rank_{rank:05d}.log"

    def _watch(self, reader: int) -> None:
        os.set_blocking(reader, False)
        watchdog = Watchdog(
            self._pages, self.watch_s, self._state_of,
            patience_s=self.patience_s, data_s=self.data_s, warn=complain,
        )  # fmt: skip
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
                    raise self._failed(watchdog)
                stall = watchdog.look()
                if stall is not None:
                    raise self._error(self._stalled(stall))
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

    def _state_of(self, rank: int) -> State:
        process = self._processes[rank]
        return state_of(process.pid) if process.poll() is None else State.GONE

    def _failed(self, watchdog: Watchdog) -> RankFailedError:
        """Waits a moment for the other ranks' words, then names the first failure."""
        if self.server is not None and not self.server.alive:
            return self._server_lost(self.server)
        if not self.run_dir.is_dir():
            # The ranks' own words went with it.
            message = f"the run folder {self.run_dir} is gone: somebody has deleted it meanwhile"
            return RankFailedError(message, replace(signalled(0, 1, time.time()), message=message))
        seen: dict[int, float] = {}
        until = time.monotonic() + _GRACE_S
        while True:
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    seen.setdefault(rank, time.time())
            # Who was killed needs no other rank's word.
            killed = any((self._processes[rank].returncode or 0) < 0 for rank in seen)
            if killed or len(seen) == self.world_size or time.monotonic() > until:
                break
            time.sleep(_POLL_S / 4)
        failures: list[Failure] = []
        for rank, at in seen.items():
            code = self._processes[rank].returncode
            if code:
                failure = read_failure(self.run_dir, rank) or failure_on(self._pages.files[rank])
                peak = getattr(self._processes[rank], "peak_bytes", 0)
                failures.append(failure or self._unsaid(signalled(rank, code, at), peak))
        beats = {rank: self._pages.beat(rank) for rank in range(self.world_size)}
        idle = {rank: watchdog.idle_s(rank) for rank in range(self.world_size) if rank not in seen}
        found = self._error(blame(failures, beats, idle))
        if any(map(timed_out, failures)) and not any(failure.exit_code < 0 for failure in failures):
            earlier = any(map(timed_out_earlier, failures))
            # What the pause has cost one rank the other may wait for from then on.
            within_s = math.inf if earlier else 2 * self.timeout_s
            paused_s = watchdog.paused_s(within_s=within_s)
            found.paused_s = paused_s if paused_s >= self.timeout_s / 2 else 0.0
        return found

    def _unsaid(self, failure: Failure, peak: int) -> Failure:
        """Why a rank has ended that could not leave a word."""
        free = free_bytes(self.run_dir)
        if failure.kind == "exit" and free < 1 << 16:
            message = f"{self.run_dir} is full ({free:,} bytes free), so the rank's words are lost"
            return replace(failure, kind="OSError", message=message)
        return self._oom.explain(failure, peak)

    def _server_lost(self, server: RankServer) -> RankFailedError:
        failure = replace(signalled(0, -signal.SIGKILL, time.time()), message=server.end())
        return RankFailedError(server.end(), failure, asked_to_stop=self._asked_to_stop is not None)

    def _stalled(self, stall: Stall) -> Failure:
        return Failure(
            stall.index, socket.gethostname(), time.time(), stall.kind, stall.message, exit_code=1
        )

    def _error(self, failure: Failure) -> RankFailedError:
        beat = self._pages.beat(failure.rank)
        failure = replace(failure, doing=beat.describe(), step=beat.step)
        if failure.exit_code == RankRefusedError.exit_code and not self._training:
            return RankRefusedError(failure.message, failure)
        message = describe(failure, self.log_file(failure.rank))
        return RankFailedError(message, failure, asked_to_stop=self._asked_to_stop is not None)

    def _end_all(self) -> None:
        """Ends what still runs: SIGTERM, then SIGKILL to whole sessions."""
        running = [process for process in self._processes if process.poll() is None]
        self._pages.tell_to_leave()
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


def rank_environment(world_size: int, threads: int | None = None) -> dict[str, str]:
    """The variables that all ranks of a run have in common.

    Args:
        world_size: Number of ranks.
        threads: Of each; None for its share of the cores.
    """
    environment = dict(os.environ)
    threads = threads or max(1, num_cores() // world_size)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment |= private_caches(environment)
    environment["PYTHONUNBUFFERED"] = "1"
    # Imports that ask whether there is a GPU then ask NVML, not CUDA, which no fork could use
    # afterwards. Lightning sets it too, but libraries may be imported before Lightning.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environment["PYTHONPATH"] = our_path(environment)
    return environment


def our_path(environment: Mapping[str, str]) -> str:
    """``PYTHONPATH`` of a child process: the code that has started it first, a checkout's, too."""
    parts = (str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH", ""))
    return os.pathsep.join(part for part in parts if part)


def our_python(module: str, *words: str) -> list[str]:
    """The command of a child process that runs a module of ours, under ``rank_environment()``.

    Without ``-P`` Python would look for our modules, and its own, in the working directory first:
    in a user's package ``launcher``, or in his ``types.py``.
    """
    return [sys.executable, "-P", "-m", module, *words]


def user_cache() -> Path:
    """Where what takes long to make is kept for the user, and for nobody else."""
    given = os.environ.get("XDG_CACHE_HOME")
    root = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    return root / "foldpipe"


def private_caches(given: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep what libraries leave for later out of folders that others can make first.

    matplotlib, which Lightning's metrics import, keeps a list of fonts; torch.compile keeps the
    code that it has made, which it runs, in ``/tmp/torchinductor_USER``: whoever makes that folder
    first chooses what is run. A variable that is set stays; one whose folder cannot be had in the
    user's own cache is left out, for fonts, or for code is a new folder of its own.
    """
    found = {}
    if "MPLCONFIGDIR" not in given and (fonts := own_folder("matplotlib")) is not None:
        found["MPLCONFIGDIR"] = fonts
    if "TORCHINDUCTOR_CACHE_DIR" not in given:
        found["TORCHINDUCTOR_CACHE_DIR"] = own_folder("inductor") or _new_folder()
    return found


def own_folder(name: str) -> str | None:
    """A folder in the user's cache; None where it cannot be had, or others can write there."""
    try:
        folder = user_cache() / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [each.stat(follow_symlinks=False) for each in (folder, folder.parent)]
    except (OSError, RuntimeError):
        return None
    ours = all(each.st_uid == os.getuid() and not each.st_mode & 0o022 for each in found)
    return str(folder) if ours and stat.S_ISDIR(found[0].st_mode) else None


@functools.cache
def _new_folder() -> str:
    return tempfile.mkdtemp(prefix="foldpipe-inductor-")


def _signal_session(process: RankProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


# ----------------------------------------------------------------------------------------- outcome
#
# ``outcome.json``: what rank 0 leaves for whoever started it.


OUTCOME = "outcome.json"
_STOPPED_BY = "stopped_by"


def write_outcome(run_dir: Path, outcome: dict[str, Any], *, stopped_by: str | None) -> None:
    """Writes the file; a signal's name marks a run that was asked to stop."""
    write_result(run_dir / OUTCOME, {**outcome, _STOPPED_BY: stopped_by})


def wait_for_outcome(run_dir: Path, *, timeout_s: float = 20.0) -> None:
    """Returns when rank 0 has written the file, or does not seem to."""
    until = time.monotonic() + timeout_s
    while not (run_dir / OUTCOME).is_file() and time.monotonic() < until:
        time.sleep(0.05)


def take_outcome(run_dir: Path) -> dict[str, Any]:
    """Reads the file, which is gone then.

    Raises:
        PreemptedError: The run was asked to stop, and has written a checkpoint.
        OSError: There is none.
    """
    file = run_dir / OUTCOME
    found: dict[str, Any] = json.loads(file.read_text())
    file.unlink()
    signal = found.pop(_STOPPED_BY)
    if signal is not None:
        checkpoint, step = found["checkpoint"], found["steps"]
        word = f"trainer.resume={checkpoint}"
        words = [w for w in typed_words(run_dir) if not w.startswith("trainer.resume=")]
        joined = "cluster=torchrun" in words  # How that is started, only its user knows.
        kind = InterruptedRunError if signal == "SIGINT" else PreemptedError
        raise kind(
            f"{signal} has stopped the run after step {step}, with a checkpoint: {checkpoint}. "
            f"Continue with {word if joined else paste(run_dir, [*words, word])}",
            {"steps": step, "checkpoint": checkpoint},
        )
    return found
