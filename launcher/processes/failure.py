"""Which rank failed first, and why: the message the user sees."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from launcher.secrets import mask
from launcher.terminal import shortened
from strategies.errors import PipelineError, RunError, without_stack
from strategies.heartbeat import Beat, Heartbeat, read_end
from strategies.raised import PAIR_CLOSED, has_lost
from strategies.small_file import read_json

_TAIL_LINES = 12
_MOST_BYTES = 1 << 26
_MOST, _MOST_LINE = 4_000, 400  # characters of somebody's exception, and of a line of a log


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended.

    Attributes:
        at: Seconds since the epoch.
        exit_code: That of its process.
        doing: Step and instruction it was in, as ``Beat.describe`` has it; empty if unknown.
        step: The optimizer step it was making, from 1; 0 before the first, or if unknown.
        lost: Whether it has only noticed that another rank is gone, or silent.
    """

    rank: int
    host: str
    at: float
    kind: str
    message: str
    exit_code: int
    doing: str = ""
    step: int = 0
    lost: bool = False


class RankFailedError(RunError):
    """A run that a rank has ended; ``figures`` are for result.json.

    ``paused_s``: for how long everything had stood still, if ranks have waited in vain for that.
    """

    def __init__(
        self, message: str, failure: Failure, *, asked_to_stop: bool = False, paused_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.asked_to_stop = asked_to_stop
        self.paused_s = paused_s
        self.figures: dict[str, object] = {}


class RankRefusedError(RankFailedError):
    """A rank has found, before the first step, that what was asked cannot be done.

    The message is the rank's own, as if the parent had seen it.
    """

    exit_code = PipelineError.exit_code


def failure_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank_{rank:05d}.error.json"


def write_failure(
    run_dir: Path, rank: int, error: BaseException, page: Heartbeat | None = None
) -> int:
    """Called by a failing rank; returns the exit code to end with."""
    failure = raised(rank, error)
    file, text = failure_file(run_dir, rank), json.dumps(asdict(failure))
    (page or Heartbeat()).end(text)
    try:
        file.write_text(text)
    except OSError as full:  # A full disk is nothing to the page.
        if full.errno == errno.EMFILE:
            os.close(0)  # A rank reads nothing there, and ends now.
            file.write_text(text)
    return failure.exit_code


def raised(rank: int, error: BaseException) -> Failure:
    """What an exception makes of a rank; somebody's text is cut, and has no secret in it."""
    said = without_stack(str(error)) or traceback.format_exception_only(error)[-1].strip()
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        at=time.time(),
        kind=type(error).__name__,
        message=shortened(mask(said), _MOST),
        exit_code=error.exit_code if isinstance(error, PipelineError) else 1,
        lost=has_lost(error),
    )


def read_failure(run_dir: Path, rank: int) -> Failure | None:
    try:
        return Failure(**read_json(failure_file(run_dir, rank), most_bytes=_MOST_BYTES))
    except (OSError, ValueError, TypeError):
        return None


def failure_on(page: int) -> Failure | None:
    """What a rank has left on its page (a descriptor), where it could write no file."""
    return Failure(**json.loads(text)) if (text := read_end(page)) else None


def signalled(rank: int, exit_code: int, at: float) -> Failure:
    """A rank that ended without a word: by a signal, or by exiting."""
    if exit_code == 143:
        exit_code = -signal.SIGTERM  # How launcher.rank.worker ends on it.
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        message = f"ended by {name}"
        if name == "SIGKILL":
            message += " (killed by somebody, or by the system for lack of memory)"
    else:
        name, message = "exit", f"ended with exit code {exit_code} and no message"
    return Failure(rank, socket.gethostname(), at, name, message, exit_code)


def first_failure(failures: list[Failure]) -> Failure:
    """The cause among many: ranks ended by a signal first, then by time.

    Peers of a killed rank fail milliseconds later with a lost connection, and say so, while the
    killed one cannot say anything.
    """

    def order(failure: Failure) -> tuple[int, float]:
        silent = failure.exit_code < 0
        return (0 if silent else 2 if is_consequence(failure) else 1, failure.at)

    return min(failures, key=order)


def is_consequence(failure: Failure) -> bool:
    """Whether a rank has only noticed that another one is gone, or silent."""
    return failure.exit_code >= 0 and failure.lost


def timed_out(failure: Failure) -> bool:
    """Whether a rank has given up waiting for another."""
    words = ("Timed out", "timed out", PAIR_CLOSED)
    return failure.lost and any(word in failure.message for word in words)


def timed_out_earlier(failure: Failure) -> bool:
    """Whether somebody else has, any time ago: a checkpoint's thread, say, and here it is heard."""
    return failure.lost and PAIR_CLOSED in failure.message


def describe(failure: Failure, log: Path) -> str:
    doing = f"\nIt was {failure.doing}." if failure.doing else ""
    said = (
        f"rank {failure.rank} on {failure.host} failed first: {failure.kind}: {failure.message}"
        f"{doing}\nIts log {log}"
    )
    if failure.kind in (LimitError.__name__, OutOfMemoryError.__name__):
        return f"{said} has the traceback."  # which says no more than the message
    try:
        lines = without_stack(log.read_text(errors="replace")).splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    tail = "".join(f"\n  | {shortened(line, _MOST_LINE)}" for line in lines)
    return f"{said} ends with:{tail or ' nothing'}"


# Which of several failing ranks is the cause, where the cause may be one that has not failed.


def blame(
    failures: Sequence[Failure], beats: Mapping[int, Beat], idle_s: Mapping[int, float]
) -> Failure:
    """The cause: a rank that was killed, one that says why, or one that all others waited for.

    A rank that has given up waiting names its neighbour, which may itself have waited for somebody
    else: who waits for whom is followed to a rank that waits for nobody.

    ``beats``: what each rank of this host has last said.
    ``idle_s``: of those that still run, for how long they have not gone on.
    """
    first = first_failure(list(failures))
    if not is_consequence(first):
        return first
    seen = [first.rank]
    # Of the first its exception says that it has waited: so it may in what it does between passes.
    while len(seen) == 1 or beats[seen[-1]].waiting:
        others = [rank for rank in beats[seen[-1]].peers or beats if rank not in seen]
        known = [rank for rank in others if rank in beats]
        if not known:
            return first
        seen.append(min(known, key=lambda rank: (beats[rank].waiting, -idle_s.get(rank, 0.0))))
    culprit = seen[-1]
    if culprit not in idle_s:
        return first  # it has ended, too, and has said nothing better
    limit = " (cluster.timeout_s)" if timed_out(first) else ""
    message = (
        f"it has not gone on for {idle_s[culprit]:.1f} s, and rank {first.rank} has given up "
        f"waiting{limit}: {first.kind}: {first.message.splitlines()[0]}"
    )
    return Failure(culprit, socket.gethostname(), first.at, "no progress", message, 1)


def explained(error: BaseException, run_dir: Path | None = None) -> RunError | None:
    """The same failure, naming what the machine lacks or limits; None if it is another one.

    ``run_dir``: None where there is no run yet, or none alone.
    """
    return as_limit(error) or as_out_of_memory(error) or as_full_disk(error, run_dir)


# Limits of the system besides memory and disk.


class LimitError(RunError):
    """What the machine has not, or does not allow: files, processes, room on a disk."""


def as_limit(error: BaseException) -> LimitError | None:
    """What ran into a limit of open files or processes, or found no /proc; None of all else."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return LimitError(
            f"too many open files: a process may have {soft:,} here.",
            fix=f"Run `ulimit -n "
            f"{hard if soft < hard else 65_536}` in this shell first"
            f"{'' if soft < hard else ', as root'}, or use fewer ranks or data.num_workers=0.",
        )
    if number == errno.EAGAIN or "can't start new thread" in text or _NO_THREAD.search(text):
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        most = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
        return LimitError(
            f"no further process or thread can be started: `ulimit -u` says {most} for this user, "
            "and a container may allow fewer (docker run --pids-limit).",
            fix="Raise it, end other "
            "processes, or use fewer ranks, OMP_NUM_THREADS=1 or data.num_workers=0.",
        )
    file = error.filename if isinstance(error, OSError) else None
    if isinstance(file, str) and file.startswith("/proc/") and not Path("/proc/self").exists():
        return LimitError(
            f"{file} is not there: processes and free memory are read from /proc, which is not "
            "mounted here.",
            fix="Run `mount -t proc proc /proc` as root, in the chroot or container.",
        )
    return None


_NO_THREAD = re.compile("pthread_create|thread.*Resource temporarily unavailable")


# Memory that has run out: in a rank that can still say so, or in one that was killed for it.

_VMSTAT = Path("/proc/vmstat")
# Allocators of torch on the host and on GPUs, and of everything else in C++.
_WORDS = re.compile(
    r"can't allocate memory|out of memory|bad_alloc|[Cc]annot allocate memory|bad_array_new_length"
    r"|failed to map segment"  # of a library that is being loaded
)


class OutOfMemoryError(RunError):
    """A rank that has not got the memory it has asked for."""


def as_out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """The same failure with what it takes to see the reason; None if it is another one."""
    if not (isinstance(error, MemoryError) or _WORDS.search(str(error))):
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited, remedy = "", "Try"
    if limit != resource.RLIM_INFINITY:
        limited = f"; address space is limited to {_gb(limit)}"
        remedy = "Run `ulimit -v unlimited` in this shell first, or try"
    said = " ".join(str(error).split("\n")[0].split())
    return OutOfMemoryError(
        f"out of memory: {said or type(error).__name__}. At most {_gb(peak_bytes())} were resident "
        f"in this process{limited}.",
        fix=f"{remedy} a smaller data.microbatch_size or recompute=full; mode=validate estimates "
        "the memory of each rank.",
    )


# A file system that takes no more, be it full, read-only or gone.

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ESTALE, errno.EIO})
_SHARED_MEMORY = Path("/dev/shm")
_SAID = ("No space left on device", "Read-only file system", "Permission denied")
_ROOM_BYTES = 1 << 26  # where so much is free, nothing small fails for lack of room


def as_full_disk(error: BaseException, run_dir: Path | None = None) -> LimitError | None:
    """The same failure with path and free bytes; None if it is another one.

    ``run_dir``: None where there is no run yet, or none alone.
    """
    text = str(error)
    shared = "torch_" in text or str(_SHARED_MEMORY) in text
    shared |= isinstance(error, OSError) and not error.filename and _between_processes(error)
    torch_shared = isinstance(error, RuntimeError) and "shm" in text
    said = next((words for words in _SAID if words in text), _SAID[0] if torch_shared else None)
    if said is not None and (shared or torch_shared):
        full = said == _SAID[0]
        what = "is full" if full else f"cannot be written: {said}"
        way_out = (
            "a larger one (docker run --shm-size=1g)"
            if full
            else "make it writable (mount -o remount,rw,mode=1777 /dev/shm)"
        )
        return LimitError(
            f"{_SHARED_MEMORY} {what} ({free_bytes(_SHARED_MEMORY):,} bytes free): loader "
            "processes hand their batches over through it. Try data.num_workers=0, or "
            f"{way_out}."
        )
    if not isinstance(error, OSError) or error.errno not in _DISK:
        return None
    if run_dir is not None and not run_dir.is_dir():
        return LimitError(f"the run folder {run_dir} is gone: somebody has deleted it meanwhile.")
    folder = Path.cwd() if run_dir is None else run_dir
    path = Path(os.fsdecode(error.filename)) if error.filename else folder
    there = next((each for each in path.absolute().parents if each.is_dir()), folder)
    free = free_bytes(folder)
    if error.errno == errno.ENOSPC and not error.filename and free > _ROOM_BYTES:
        return LimitError(
            f"{os.strerror(error.errno)}: somewhere else than in {folder}, where {free:,} bytes "
            "are free, and nobody has said where. The log shows who was writing."
        )
    kept = run_dir is not None and any(run_dir.glob("checkpoints/*"))
    on = "; trainer.resume=auto goes on from the newest whole checkpoint" if kept else ""
    ours = path.absolute().is_relative_to(folder)
    return LimitError(
        f"{path} cannot be written: {os.strerror(error.errno or 0)} ({free_bytes(there):,} bytes "
        f"are free in {there}).",
        fix=f"Free some, or try another {'hydra.run.dir' if ours else 'place for it'}{on}.",
    )


def _between_processes(error: BaseException) -> bool:
    """Whether it comes from what processes share: semaphores, say, which name no file."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(f.f_globals.get("__name__")).startswith("multiprocessing.") for f in frames)


def as_in_the_way(error: BaseException, run_dir: Path) -> RunError | None:
    """What keeps a file of ours from being written into the run's folder; None if it is not that.

    A folder of that name, say, or a file that another user has left there.
    """
    if not isinstance(error, OSError) or not error.filename:
        return None
    path = Path(os.fsdecode(error.filename2 or error.filename)).absolute()
    if not path.is_relative_to(run_dir):
        return None
    return RunError(
        f"{path} cannot be written: {error.strerror}.",
        fix="Remove what is there, or try another hydra.run.dir.",
    )


def free_bytes(folder: Path) -> int:
    """What this user may still write on the file system of a folder; 0 where nobody can say."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class OomCount:
    """Kills for lack of memory that the kernel has counted since this was made."""

    _before: int = field(default_factory=lambda: _kills())

    def explain(self, failure: Failure, peak_bytes: int = 0) -> Failure:
        """Adds to a SIGKILL that the kernel has killed somebody, and the peak of the ranks.

        ``peak_bytes``: of a rank that has ended and was no child of this process.
        """
        if failure.kind != "SIGKILL" or _kills() == self._before:
            return failure
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        peak = max(children, peak_bytes)
        return replace(
            failure,
            kind="OutOfMemory",
            message=(
                "ended by SIGKILL, and the kernel has killed a process for lack of memory "
                f"meanwhile; a rank that has ended had at most {_gb(peak)} resident"
            ),
        )


def _kills() -> int:
    """Of the whole machine, since it was started."""
    try:
        found = re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 0 if found is None else int(found[1])


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
