"""What a benchmarked engine is: something that runs one training step of an emulated pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from benchmarks.overhead_emulation import Emulation


@dataclass(frozen=True, slots=True)
class Task:
    """One cell of the table, as a rank sees it.

    Attributes:
        schedule: Our name of the schedule.
        ranks: P.
        num_microbatches: M.
        rank: This process.
        emulation: What its stages take.
    """

    schedule: str
    ranks: int
    num_microbatches: int
    rank: int
    emulation: Emulation


class Engine(ABC):
    """Built anew for every task; collective."""

    @abstractmethod
    def step(self) -> None:
        """Runs one step; returns when this rank is through its list."""

    def order(self) -> str | None:
        """The compute order as CSV, where it is not that of our schedule."""
        return None

    def close(self) -> None:
        """Ends everything in flight; nothing where a step leaves nothing in flight."""
        return None
