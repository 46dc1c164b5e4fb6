"""The heartbeat pages of this host's ranks: made before they start, handed to them, read later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strategies.heartbeat import Beat, Heartbeat, new_page, read_beat, read_mark, tell_to_leave

_VARIABLE = "FOLDPIPE_HEARTBEAT"


@dataclass(frozen=True, slots=True)
class Pages:
    """One page per rank.

    Attributes:
        files: Descriptors, to be passed on to the ranks.
    """

    files: Sequence[int]

    @classmethod
    def make(cls, count: int) -> Pages:
        """Fresh ones; ``close`` gives them back."""
        return cls(tuple(new_page() for _ in range(count)))

    def variables(self, index: int) -> dict[str, str]:
        """What a rank finds its page by."""
        return {_VARIABLE: str(self.files[index])}

    def beat(self, index: int) -> Beat:
        """What a rank has last said."""
        return read_beat(self.files[index])

    def mark(self, index: int) -> tuple[int, int]:
        """Changes whenever the rank goes on; cheaper than ``beat``."""
        return read_mark(self.files[index])

    def tell_to_leave(self) -> None:
        """From now on SIGTERM ends the ranks at once."""
        for file in self.files:
            tell_to_leave(file)

    def close(self) -> None:
        """Gives the memory back."""
        for file in self.files:
            os.close(file)


def own_heartbeat(environment: Mapping[str, str]) -> Heartbeat:
    """This rank's page, or one that nobody reads where no process watches it."""
    known = environment.get(_VARIABLE)
    return Heartbeat(None if known is None else int(known))
