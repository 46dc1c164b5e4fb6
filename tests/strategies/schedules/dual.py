"""What the tests of DualPipe and of its V share: torch's lists, and programs without pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from strategies.compiler import compile_compute
from strategies.ir.program import Program
from strategies.ir.verify import verify
from strategies.lowering.send_recv import add_messages
from strategies.passes.updates import accumulate_only
from strategies.plan import Plan


@dataclass(frozen=True)
class Paired:
    """What the report says of a schedule that runs F and B of opposite ways as pairs.

    Attributes:
        shapes: (P, M).
        pairs: Microbatches' worth of pairs on the rank that waits most, from P and M.
        hops: Forwards that a rank waits when nothing is fused, from P.
        spare: Microbatches held above P.
    """

    shapes: list[tuple[int, int]]
    pairs: Callable[[int, int], float]
    hops: Callable[[int], float]
    spare: float


PAIRED = {
    "dualpipe": Paired(
        [(2, 4), (2, 10), (4, 8), (4, 16), (6, 12), (6, 14), (8, 16), (8, 32)],
        pairs=lambda p, m: m - p - 1,
        hops=lambda p: p // 2 - 1,
        spare=1,
    ),
    "dualpipe_v": Paired(
        [(1, 2), (1, 5), (2, 4), (2, 9), (3, 6), (4, 8), (4, 16), (8, 16), (8, 32)],
        pairs=lambda p, m: (m - p) - 1 / 2,
        hops=lambda p: (p - 1) / 2,
        spare=0.5,
    ),
}


def without_pairs(schedule: str, pp: int, num_microbatches: int) -> Program:
    """The same order, lowered, with each pair's forward and backward as two instructions."""
    compute = compile_compute(Plan(schedule, pp, num_microbatches))
    rows = tuple(tuple(part for item in row for part in item.parts) for row in compute.ranks)
    return verify(add_messages(accumulate_only(compute.with_ranks(rows))))


def torchs_lists(pp: int, num_microbatches: int) -> list[list[str]]:
    """Rank -> instructions of torch's DualPipeV, spelled as ours are."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops("DualPipeV", pp, num_microbatches, 2)
    return [
        [str(action) for action in row if action is not None and "REDUCE" not in str(action)]
        for row in rows
    ]
