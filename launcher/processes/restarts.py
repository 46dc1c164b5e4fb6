"""Ranks that have failed are started again, from the newest checkpoint of their run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.processes.failure import Failure, RankFailedError, RankRefusedError


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What would have to change for another attempt to get further.

    Attributes:
        checkpoint: From which it began.
        rank: The first that failed.
        kind: How.
        step: Where.
    """

    checkpoint: Path | None
    rank: int
    kind: str
    step: int


class Restarts:
    """Decides whether ranks that have failed are started again.

    Args:
        most: How often.
        newest: Finds the newest whole checkpoint to go on with; None to begin anew.
        say: Told one line per restart.

    Attributes:
        count: Restarts so far.
    """

    def __init__(
        self, most: int, newest: Callable[[], Path | None], say: Callable[[str], None]
    ) -> None:
        self._most = most
        self._newest = newest
        self._say = say
        self._last: _Attempt | None = None
        self.count = 0

    def run(self, start: Callable[[Path | None], None], checkpoint: Path | None) -> None:
        """Starts the ranks until they end well, or it makes no sense to try again.

        Args:
            start: Starts them from a checkpoint and waits for them.
            checkpoint: The first time.

        Raises:
            RankFailedError: The last failure.
        """
        while True:
            try:
                start(checkpoint)
                return
            except RankRefusedError:
                raise
            except RankFailedError as error:
                refused = self._refused(error, checkpoint)
                if refused is not None:
                    raise RankFailedError(f"{error}{refused}", error.failure) from None
                checkpoint = self._newest()
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
        attempt = _Attempt(checkpoint, failure.rank, failure.kind, failure.step)
        again = attempt == self._last
        self._last = attempt
        if again:
            return "\nNot restarted: the same has happened twice at this step."
        return None


def _short(failure: Failure) -> str:
    first = failure.message.splitlines()[0]
    where = f" {failure.doing}" if failure.doing else ""
    return f"rank {failure.rank} on {failure.host} failed{where}: {failure.kind}: {first}"
