"""Which rank owns a stage, and which runs a microbatch through it. Nothing else maps the two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages to ranks, once per weight copy.

    Attributes:
        name: ``loop``, ``v`` or ``bidirectional``.
        num_ranks: P.
        copies: ``copies[c][stage]`` is the rank that holds copy ``c`` of ``stage``. Microbatch
            ``m`` runs on copy ``m % len(copies)``.
    """

    name: str
    num_ranks: int
    copies: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        """S, virtual stages included."""
        return len(self.copies[0])

    @property
    def weight_copies(self) -> int:
        return len(self.copies)

    @property
    def stages_per_rank(self) -> int:
        """V: the stages that one rank owns, weight copies included."""
        return self.num_stages * self.weight_copies // self.num_ranks

    @property
    def stages_per_microbatch(self) -> float:
        """The stages of one rank that one microbatch crosses: V, or V / 2 with two copies.

        The mean over the ranks, where somebody's own placement gives them unequal numbers.
        """
        return self.num_stages / self.num_ranks

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.copies[microbatch % len(self.copies)][stage]

    def owners(self, stage: int) -> tuple[int, ...]:
        """All ranks that hold the weights of ``stage``, ascending."""
        if len(self.copies) == 1:
            return (self.copies[0][stage],)
        return tuple(sorted({copy[stage] for copy in self.copies}))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, ascending."""
        return _stages_of_ranks(self).get(rank, ())


@lru_cache(maxsize=4096)
def _stages_of_ranks(placement: Placement) -> dict[int, tuple[int, ...]]:
    """Ascending; of all ranks at once, which may be hundreds and are asked for one by one."""
    found: dict[int, list[int]] = {}
    for stage, owners in enumerate(zip(*placement.copies, strict=True)):
        for rank in dict.fromkeys(owners):
            found.setdefault(rank, []).append(stage)
    return {rank: tuple(stages) for rank, stages in found.items()}


def loop(num_ranks: int, stages_per_rank: int) -> Placement:
    """Stage s lies on rank s mod P.

    >>> loop(2, 2).copies
    ((0, 1, 0, 1),)
    """
    stages = range(num_ranks * stages_per_rank)
    return Placement("loop", num_ranks, (tuple(stage % num_ranks for stage in stages),))


def v(num_ranks: int, stages_per_rank: int = 2) -> Placement:
    """Every second row of stages runs backwards, so that a row's last rank starts the next.

    >>> v(3).copies
    ((0, 1, 2, 2, 1, 0),)
    """
    row = tuple(range(num_ranks))
    rows = (row if index % 2 == 0 else row[::-1] for index in range(stages_per_rank))
    return Placement("v", num_ranks, (tuple(rank for row in rows for rank in row),))


def bidirectional(num_ranks: int) -> Placement:
    """Two weight copies in opposite directions: even microbatches run down, odd ones up.

    >>> bidirectional(3).copies
    ((0, 1, 2), (2, 1, 0))
    """
    down = tuple(range(num_ranks))
    return Placement("bidirectional", num_ranks, (down, down[::-1]))


PLACEMENTS = ("loop", "v", "bidirectional")
