"""Which rank failed first, and why: the message the user sees."""

from __future__ import annotations

import json
import signal
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.masking import mask
from strategies.errors import PipelineError, RunError

_TAIL_LINES = 12
_LOST = ("Connection", "connection", "Broken pipe", "gloo", "Timed out", "another rank failed")


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended.

    Attributes:
        rank: Global rank.
        host: Where it ran.
        at: Seconds since the epoch.
        kind: Exception type, or the signal's name.
        message: What it said.
        exit_code: That of its process.
        doing: Step and instruction it was in, as ``Beat.describe`` has it; empty if unknown.
        step: The optimizer step it was making, from 1; 0 before the first, or if unknown.
    """

    rank: int
    host: str
    at: float
    kind: str
    message: str
    exit_code: int
    doing: str = ""
    step: int = 0


class RankFailedError(RunError):
    """A run that a rank has ended.

    Attributes:
        failure: Of that rank.
        asked_to_stop: Whether the ranks had been asked to stop by then.
        figures: For result.json.
    """

    def __init__(self, message: str, failure: Failure, *, asked_to_stop: bool = False) -> None:
        super().__init__(message)
        self.failure = failure
        self.asked_to_stop = asked_to_stop
        self.figures: dict[str, object] = {}


class RankRefusedError(RankFailedError):
    """A rank has found, before the first step, that what was asked cannot be done.

    The message is the rank's own, as if the parent had seen it.
    """

    exit_code = PipelineError.exit_code


def failure_file(run_dir: Path, rank: int) -> Path:
    """Where a rank leaves its failure."""
    return run_dir / "logs" / f"rank_{rank:05d}.error.json"


def write_failure(run_dir: Path, rank: int, error: BaseException) -> int:
    """Called by a failing rank; returns the exit code to end with."""
    code = error.exit_code if isinstance(error, PipelineError) else 1
    failure = Failure(
        rank=rank,
        host=socket.gethostname(),
        at=time.time(),
        kind=type(error).__name__,
        message=mask(str(error) or traceback.format_exception_only(error)[-1].strip()),
        exit_code=code,
    )
    failure_file(run_dir, rank).write_text(json.dumps(asdict(failure)))
    return code


def read_failure(run_dir: Path, rank: int) -> Failure | None:
    """What a rank left, if it could."""
    try:
        return Failure(**json.loads(failure_file(run_dir, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def signalled(rank: int, exit_code: int, at: float) -> Failure:
    """A rank that ended without a word: by a signal, or by exiting."""
    if exit_code == 143:
        exit_code = -signal.SIGTERM  # How launcher.worker ends on it.
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
    return failure.exit_code >= 0 and any(word in failure.message for word in _LOST)


def describe(failure: Failure, log: Path) -> str:
    """One message with the end of the rank's log."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    tail = "".join(f"\n  | {line}" for line in lines)
    doing = f"\nIt was {failure.doing}." if failure.doing else ""
    return (
        f"rank {failure.rank} on {failure.host} failed first: {failure.kind}: {failure.message}"
        f"{doing}\nIts log {log} ends with:{tail or ' nothing'}"
    )
