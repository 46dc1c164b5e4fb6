"""How a rank is asked to stop, and what it is called when a run did: preempted, not failed.

Torch-free on purpose: ``StopRequest`` stands before torch is imported, which takes seconds, and a
signal that arrives in between must not kill the run without a checkpoint.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType

from launcher.processes.failure import Failure, RankFailedError, RankRefusedError
from strategies.errors import DamagedCheckpointError, RunError

PREEMPTED = 85
PRUNED = 86  # of a job inside a sweep; the sweep's own code knows nothing of it
INTERRUPTED = 130


class PreemptedError(RunError):
    """A run that was asked to stop, and wrote a checkpoint first; ``figures`` are what it left."""

    exit_code = PREEMPTED

    def __init__(self, message: str, figures: Mapping[str, object]) -> None:
        super().__init__(message)
        self.figures = dict(figures)


class InterruptedRunError(PreemptedError):
    """The same by Ctrl-C: somebody sat there, so nothing is to be submitted again by itself."""

    exit_code = INTERRUPTED


class PrunedError(RunError):
    """A job of a sweep that was ended because others do better; ``figures`` are what it left."""

    exit_code = PRUNED

    def __init__(self, message: str, figures: Mapping[str, object]) -> None:
        super().__init__(message)
        self.figures = dict(figures)


class StopRequest:
    """Remembers that a signal which asks for the end has arrived.

    Nothing else happens in the handlers: a collective there would wait for ranks that are in the
    middle of a step.

    Args:
        leaves: Whether whoever has started this process is ending it: then it goes at once.

    Attributes:
        signal: Name of the first one; None as long as there is none.
    """

    def __init__(self, *, leaves: Callable[[], bool] = lambda: False) -> None:
        self.signal: str | None = None
        self._leaves = leaves
        self._obeyed = True

    def install(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            signal.signal(number, self)

    def disregard(self) -> None:
        """From now on a signal ends this process at once: there is nothing to be saved."""
        self._obeyed = False
        if self.signal is not None:
            os._exit(143)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._obeyed or self._leaves():
            # Exit handlers of a half-dead communication could wait for peers for ever.
            os._exit(143)
        if self.signal is None:
            self.signal = signal.Signals(number).name


def installed_request() -> StopRequest | None:
    """The request that this process listens for; None where nothing was installed."""
    handler = signal.getsignal(signal.SIGUSR1)
    return handler if isinstance(handler, StopRequest) else None


# Ranks that have failed are started again, from the newest checkpoint of their run.


class Restarts:
    """Decides whether ranks that have failed are started again, and from which checkpoint.

    Args:
        newest: The newest checkpoint besides those that ranks have found damaged, where the run
            goes on by itself; a checkpoint that was asked for by name is not replaced.
    """

    def __init__(
        self,
        most: int,
        newest: Callable[[Collection[Path]], Path | None],
        say: Callable[[str], None],
        *,
        named: Path | None = None,
    ) -> None:
        self._most = most
        self._newest = newest
        self._say = say
        self._named = named
        self._damaged: set[Path] = set()
        self._last: tuple[Path | None, int, str, int] | None = None
        self.count = 0
        self.pauses = 0

    def run(self, start: Callable[[Path | None], None], checkpoint: Path | None) -> None:
        """Starts the ranks until they end well, or it makes no sense to try again."""
        while True:
            try:
                start(checkpoint)
                return
            except RankRefusedError as error:
                damaged = error.failure.kind == DamagedCheckpointError.__name__
                if not damaged or checkpoint is None or checkpoint == self._named:
                    raise
                # All ranks have compared all hashes; here only those of small ones were.
                self._damaged.add(checkpoint)
                self._say(f"skips {checkpoint}: {_first(error.failure)}")
                checkpoint = self._newest(self._damaged)
                where = "from the beginning" if checkpoint is None else f"from {checkpoint}"
                self._say(f"starts {where}")
            except RankFailedError as error:
                if error.paused_s and not error.asked_to_stop:
                    self.pauses += 1
                    checkpoint = self._newest(self._damaged)
                    where = "from the beginning" if checkpoint is None else f"from {checkpoint}"
                    self._say(
                        f"everything has stood still for {error.paused_s:.0f} s, and ranks do not "
                        f"wait that long for each other (cluster.timeout_s): starts again {where}"
                    )
                    continue
                refused = self._refused(error, checkpoint)
                if refused is not None:
                    raise RankFailedError(f"{error}{refused}", error.failure) from None
                checkpoint = self._newest(self._damaged)
                self.count += 1
                where = "from the beginning" if checkpoint is None else f"from {checkpoint}"
                self._say(f"restart {self.count} of {self._most} {where}: {_short(error.failure)}")

    def _refused(self, error: RankFailedError, checkpoint: Path | None) -> str | None:
        """Why the ranks are not started again; None if they are."""
        failure = error.failure
        if self._most == 0:
            return ""
        if error.asked_to_stop:
            return "\nNot restarted: a signal had asked for the end."
        if failure.exit_code == 2:
            return "\nNot restarted: the same would happen again."
        if self.count >= self._most:
            return f"\nNot restarted: trainer.max_restarts={self._most} are used up."
        # What would have to change for another attempt to get further.
        attempt = checkpoint, failure.rank, failure.kind, failure.step
        before, self._last = self._last, attempt
        if before == attempt:
            return "\nNot restarted: the same has happened twice at this step."
        return None


def _short(failure: Failure) -> str:
    first = _first(failure)
    where = f" {failure.doing}" if failure.doing else ""
    return f"rank {failure.rank} on {failure.host} failed{where}: {failure.kind}: {first}"


def _first(failure: Failure) -> str:
    return failure.message.splitlines()[0] if failure.message else failure.kind
