"""A placement as lanes, the form in which orders are generated.

A lane is one stage of one weight copy: it lies on one rank, and its microbatches run in ascending
order. Numbers instead of instructions, because a search makes hundreds of orders.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import Placement
from strategies.schedules.schedule import Rows

F, I, W = range(3)  # noqa: E741
_KINDS = (Kind.F, Kind.I, Kind.W)

Step = tuple[int, int, int]  # F, I or W; lane; how many of that kind the lane has run before
StepRows = list[list[Step]]


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lanes of one placement and number of microbatches, in the order a microbatch crosses them.

    Attributes:
        size: Microbatches that run on each lane.
        of_rank: Lanes of each rank, lowest stage first.
        num_stages: S; the lanes of weight copy c are c * S to c * S + S - 1.
        num_copies: 2 in a bidirectional placement, else 1.
    """

    rank: tuple[int, ...]
    stage: tuple[int, ...]
    size: tuple[int, ...]
    of_rank: tuple[tuple[int, ...], ...]
    num_stages: int
    num_copies: int

    @property
    def num_microbatches(self) -> int:
        return sum(self.size[:: self.num_stages])

    def rows(self, steps: StepRows) -> Rows:
        return tuple(tuple(self._instruction(*step) for step in row) for row in steps)

    def _instruction(self, kind: int, lane: int, index: int) -> Instruction:
        microbatch = index * self.num_copies + lane // self.num_stages
        return Instruction(_KINDS[kind], self.stage[lane], microbatch)

    def steps(self, rows: Rows) -> StepRows:
        """An order of F, I and W whose microbatches ascend on every lane."""
        encoded: StepRows = []
        for row in rows:
            encoded.append([])
            for item in row:
                assert item.microbatch is not None
                index, copy = divmod(item.microbatch, self.num_copies)
                lane = copy * self.num_stages + item.stage
                encoded[-1].append((_KINDS.index(item.kind), lane, index))
        return encoded


def lanes_of(placement: Placement, num_microbatches: int) -> Lanes:
    rank = tuple(rank for copy in placement.copies for rank in copy)
    stage = tuple(range(placement.num_stages)) * placement.weight_copies
    copies = placement.weight_copies
    size = tuple(
        len(range(lane // placement.num_stages, num_microbatches, copies))
        for lane in range(len(rank))
    )
    of_rank = tuple(
        tuple(
            sorted((lane for lane, owner in enumerate(rank) if owner == r), key=lambda n: stage[n])
        )
        for r in range(placement.num_ranks)
    )
    return Lanes(rank, stage, size, of_rank, placement.num_stages, copies)


def routes(lanes: Lanes) -> list[list[tuple[int, int]]]:
    """``next_of`` of F and I, per lane."""
    return [[next_of(lanes, kind, lane) for lane in range(len(lanes.rank))] for kind in (F, I)]


def first_arrivals(lanes: Lanes, never: float) -> list[list[list[float]]]:
    """When the inputs of F and I are there, per lane and index, before anything has run."""
    forward = [[never if s else 0.0] * n for s, n in zip(lanes.stage, lanes.size, strict=True)]
    return [forward, [[never] * n for n in lanes.size]]


def next_of(lanes: Lanes, kind: int, lane: int) -> tuple[int, int]:
    """(lane, F or I) that takes up what an F or I has made; lane -1 after the first stage's I."""
    if kind == I:
        return (lane - 1 if lanes.stage[lane] else -1), I
    if lanes.stage[lane] + 1 < lanes.num_stages:
        return lane + 1, F
    return lane, I
