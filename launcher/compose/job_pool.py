"""Jobs of a sweep side by side: one process each, with its share of this machine.

The processes are forked before anything heavy is imported, take one job after the other, and keep
the process that their ranks are forked from. Each leads a process group: Ctrl-C reaches the sweep
alone, which hands it on, so that every job writes its checkpoint and the table is written after
that. Words between the two are lines of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.checkpoints import hold
from launcher.compose.job_start import OUTPUT, Begun, Ended, JobStarter
from launcher.config import LaunchConfig
from launcher.config.key import spell
from launcher.report.sweep.sweep_jobs import file_stamps
from launcher.resolve import num_cores, num_gpus, uses_gpu
from launcher.secrets import MaskedStream
from launcher.terminal import LastingStream, complain
from strategies.errors import PipelineError, PlanError
from strategies.plan import IDLE_RANK_BYTES

_LOOK_S = 0.5
_PR_SET_PDEATHSIG = 1
_ALONE = ("profile",)  # modes that measure this machine
_WITHOUT_RANKS = ("simulate", "plan", "validate")
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def check_parallel(configs: Sequence[LaunchConfig]) -> None:
    """Refuses more jobs side by side than this machine has cores, GPUs or memory for.

    ``configs``: of all jobs, or of those that are known.
    """
    _check_clusters(configs)
    asked = {config.sweep.parallel for config in configs}
    if len(asked) > 1:
        raise PlanError(
            f"sweep.parallel={','.join(map(str, sorted(asked)))} is about the whole sweep. "
            f"Try sweep.parallel={min(asked)}."
        )
    (parallel,) = asked
    if parallel == 1:
        return
    first = configs[0]
    if first.cluster.name == "slurm":
        raise PlanError(
            f"sweep.parallel={parallel} shares out this machine, and cluster=slurm submits jobs "
            "that run when and where there is room. Try without it."
        )
    if first.mode in _ALONE:
        raise PlanError(
            f"mode={first.mode} measures this machine, which other jobs must not disturb. "
            "Try sweep.parallel=1."
        )
    cores = num_cores()
    if parallel > cores:
        raise PlanError(
            f"sweep.parallel={parallel}, but this machine has {cores} "
            f"{'core' if cores == 1 else 'cores'}, and each job takes one at least. "
            f"Try sweep.parallel={cores}."
        )
    if first.mode in _WITHOUT_RANKS:
        return
    worlds = sorted((_least_world(config) for config in configs), reverse=True)
    if any(uses_gpu(config) for config in configs):
        _check_gpus(parallel, max(w for w, c in _with_world(configs) if uses_gpu(c)), configs)
    else:
        _check_memory(parallel, worlds)


def _check_clusters(configs: Sequence[LaunchConfig]) -> None:
    """A sweep is run here, or submitted as a whole."""
    names = sorted({config.cluster.name for config in configs})
    if "slurm" in names and len(names) > 1:
        other = next(name for name in names if name != "slurm")
        raise PlanError(
            f"cluster={','.join(names)}: the jobs of a sweep are run here, or submitted together. "
            f"Try one sweep with cluster=slurm, and one with cluster={other}."
        )
    throttles = {config.cluster.throttle for config in configs}
    if len(throttles) > 1:
        raise PlanError(
            f"cluster.throttle={','.join(map(spell, throttles))} is about the whole sweep. "
            "Try cluster.throttle=4."
        )


def _with_world(configs: Sequence[LaunchConfig]) -> Iterator[tuple[int, LaunchConfig]]:
    return ((_least_world(config), config) for config in configs)


def _least_world(config: LaunchConfig) -> int:
    return config.pp * config.tp * (1 if config.dp == "auto" else int(config.dp))


def _check_gpus(parallel: int, world: int, configs: Sequence[LaunchConfig]) -> None:
    if all(config.cluster.backend in ("shared", "staged") for config in configs):
        return  # GPUs are shared by ranks
    gpus = num_gpus()
    if parallel * world > gpus:
        fits = gpus // world
        fix = f"sweep.parallel={fits}" if fits else "sweep.parallel=1 cluster.backend=shared"
        raise PlanError(
            f"sweep.parallel={parallel} jobs of up to {world} ranks take {parallel * world} GPUs, "
            f"and this machine has {gpus}. Try {fix}."
        )


def _check_memory(parallel: int, worlds: Sequence[int]) -> None:
    import psutil

    ranks, free = sum(worlds[:parallel]), psutil.virtual_memory().available
    if ranks * IDLE_RANK_BYTES > free:
        fits = max(1, int(free // (IDLE_RANK_BYTES * worlds[0])))
        raise PlanError(
            f"sweep.parallel={parallel} jobs have {ranks} ranks at once, which need about "
            f"{ranks * IDLE_RANK_BYTES / 1e9:.1f} GB ({IDLE_RANK_BYTES / 1e9:.2f} GB each), but "
            f"{free / 1e9:.1f} GB are free. Try sweep.parallel={min(fits, parallel - 1)}."
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several jobs has of this machine.

    Attributes:
        cores: Their numbers; empty where a process cannot be bound to cores.
        gpus: Their names in ``CUDA_VISIBLE_DEVICES``; None where that is left alone.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...] | None

    def take(self) -> None:
        """Makes it this process's own, and that of all that it starts."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)


def shares(parallel: int) -> list[Share]:
    """The machine in equal parts; what is left over is left idle."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // parallel
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(number) for number in range(num_gpus())]
    if visible is not None:
        gpus = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    found = []
    for number in range(parallel):
        mine: tuple[str, ...] | None = None
        if gpus and len(gpus) >= parallel:
            few = len(gpus) // parallel
            mine = tuple(gpus[number * few : (number + 1) * few])
        elif gpus:
            mine = (gpus[number % len(gpus)],)
        found.append(Share(tuple(cores[number * each : (number + 1) * each]), mine))
    return found


@dataclass(slots=True)
class _Worker:
    """A process that runs jobs, as the sweep sees it."""

    share: Share
    pid: int
    to: int
    back: int
    job: int | None = None
    buffer: bytes = b""
    ended: list[Ended] = field(default_factory=list)


class JobPool:
    """Runs jobs side by side; a context manager.

    Args:
        begun: Told of each job's folder before anything runs in it.
        look: Called while jobs run.
    """

    def __init__(
        self, starter: JobStarter, parallel: int, begun: Begun, look: Callable[[], None]
    ) -> None:
        self.interrupted = False
        self._starter = starter
        self._begun = begun
        self._look = look
        self._asked = 0
        self._signals: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._workers: list[_Worker] = []
        for share in shares(parallel):
            self._workers.append(self._fork(share))

    def __enter__(self) -> JobPool:
        for number in (*_STOPS, signal.SIGTSTP):
            if signal.getsignal(number) != signal.SIG_IGN:  # under nohup, say
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            self._end(worker)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def free(self) -> bool:
        return any(worker.job is None for worker in self._workers)

    def busy(self) -> bool:
        return any(worker.job is not None for worker in self._workers)

    def start(self, index: int, words: Sequence[str]) -> None:
        worker = next(worker for worker in self._workers if worker.job is None)
        worker.job = index
        try:
            _tell(worker.to, {"index": index, "words": list(words)})
        except BrokenPipeError:  # killed while it had nothing to do
            self._lost(worker)

    def wait(self) -> list[Ended]:
        """Jobs that have ended since; waits for the first, and hands on signals meanwhile."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if worker.job is not None:
                    selector.register(worker.back, selectors.EVENT_READ, worker)
            while True:
                ended = [found for worker in self._workers for found in _taken(worker)]
                if ended:
                    return ended
                self._hand_on()
                self._look()
                for key, _ in selector.select(_LOOK_S):
                    self._read(key.data)

    def stop(self) -> None:
        """Asks the jobs that run to end, with what checkpoint they can write."""
        if not self._asked:
            self._pass_on(signal.SIGINT)
            self._asked += 1

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))

    def _hand_on(self) -> None:
        for number in self._signals:
            if number == signal.SIGTSTP:
                self._pause()
                continue
            self.interrupted |= number == signal.SIGINT
            # A terminal that closes says so several times, and means one end.
            self._asked += number not in (signal.SIGUSR1, signal.SIGHUP) or not self._asked
            if number == signal.SIGINT:
                running = sum(worker.job is not None for worker in self._workers)
                jobs = f"{running} job{'' if running == 1 else 's'}"
                complain(f"stopping {jobs}, with checkpoints; Ctrl-C again: at once")
            self._pass_on(signal.SIGKILL if self._asked > 2 else number)
        self._signals.clear()

    def _pause(self) -> None:
        self._pass_on(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns with `fg`
        self._pass_on(signal.SIGCONT)

    def _pass_on(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.job is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, number)

    def _read(self, worker: _Worker) -> None:
        data = os.read(worker.back, 1 << 16)
        if not data:
            self._lost(worker)
            return
        *lines, worker.buffer = (worker.buffer + data).split(b"\n")
        for line in lines:
            self._understand(worker, json.loads(line))

    def _understand(self, worker: _Worker, said: dict[str, Any]) -> None:
        if "folder" in said:
            stamps = tuple(None if s is None else (int(s[0]), int(s[1])) for s in said["stamps"])
            self._begun(said["index"], Path(said["folder"]), stamps)
        else:
            worker.ended.append(Ended(**said))

    def _lost(self, worker: _Worker) -> None:
        """A process that has ended without a word: killed, by somebody or for lack of memory."""
        _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        error = f"the process of the job has ended ({name}), by somebody or for lack of memory"
        job, told = worker.job, self._asked > 0
        assert job is not None
        os.close(worker.to)
        os.close(worker.back)
        self._workers.remove(worker)
        self._workers.append(self._fork(worker.share))
        ended = Ended(job, None, "interrupted", {}) if told else Ended(job, 1, error, {})
        # As a job of the one that takes its place, which is free as soon as that is told.
        self._workers[-1].job = job
        self._workers[-1].ended.append(ended)

    def _fork(self, share: Share) -> _Worker:
        down, to = os.pipe()
        back, up = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent, pid = os.getpid(), os.fork()
        if pid:
            os.close(down)
            os.close(up)
            return _Worker(share, pid, to, back)
        try:
            _live_with(parent)
            for worker in self._workers:
                os.close(worker.to)
                os.close(worker.back)
            os.close(to)
            os.close(back)
            share.take()
            _serve(self._starter, down, up)
        except BaseException:
            os._exit(1)
        os._exit(0)

    def _end(self, worker: _Worker) -> None:
        os.close(worker.to)  # the worker ends when nothing more can come
        os.close(worker.back)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(worker.pid, signal.SIGKILL if worker.job is not None else signal.SIGTERM)
            os.waitpid(worker.pid, 0)


def _taken(worker: _Worker) -> list[Ended]:
    ended, worker.ended = worker.ended, []
    if ended:
        worker.job = None
    return ended


def _tell(descriptor: int, said: dict[str, Any]) -> None:
    data = (json.dumps(said) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


# The other side: what a process does that runs jobs.


def _live_with(parent: int) -> None:
    """Ends with the sweep, hears no Ctrl-C of the terminal, and has signals as a command has."""
    os.setpgid(0, 0)
    for number in (*_STOPS, signal.SIGTSTP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def _serve(starter: JobStarter, down: int, up: int) -> None:
    with contextlib.suppress(KeyboardInterrupt), open(down, encoding="utf-8") as requests:
        for line in requests:
            said = json.loads(line)
            _tell(up, asdict(_run(starter, said["index"], said["words"], up)))


def _run(starter: JobStarter, index: int, words: Sequence[str], up: int) -> Ended:
    def begun(folder: Path) -> None:
        stamps = [None if stamp is None else list(stamp) for stamp in file_stamps(folder)]
        _tell(up, {"index": index, "folder": str(folder), "stamps": stamps})

    try:
        return starter.run(index, words, begun, _whole_output)
    except KeyboardInterrupt:
        return Ended(index, None, "interrupted", {})
    except PipelineError as error:
        return Ended(index, error.exit_code, str(error), {})
    except Exception as error:
        return Ended(index, 1, f"{type(error).__name__}: {error}", {})


@contextlib.contextmanager
def _whole_output(folder: Path) -> Iterator[None]:
    """Also what C libraries and child processes say; two jobs never write into one folder."""
    with (
        hold(folder),
        (folder / OUTPUT).open(
            "a", buffering=1, encoding="utf-8", errors="backslashreplace"
        ) as file,
    ):
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        sys.stdout = sys.stderr = MaskedStream(LastingStream(file))
        yield
