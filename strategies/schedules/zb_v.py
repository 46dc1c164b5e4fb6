"""ZB-V: two stages per rank in V shape, split backward; ZB-H2's period in ZB-H1's memory.

Qi et al., 2024, "Zero Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241, section 6.

2 ranks, 4 microbatches, 2 stages per rank, B twice as long as F, I and W one F each; a slot is
half an F, and the second half stands below the first (``.``: idle)::

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2
    rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1

    rank 0 | 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .
    rank 1 | 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

Rank r warms up with 2(P-r)-1 forwards of its first stage, then r of each stage in turn, then P-r
times F, I, W of its second stage. Peak: P microbatches on every rank, 1F1B's first. For M >= 2P-1
and F = I = W the makespan is M(F+I+W) + (P-1)F/2 and the period M(F+I+W): no bubble where ranks do
not wait for each other at the flush. Any M >= 1.

For other costs, or M < 2P-1, orders are generated as well (``best_order.py``) within P microbatches
per rank; the best period wins, and the best makespan among equal ones.
"""

from __future__ import annotations

from itertools import count

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import v
from strategies.schedules.schedule import Rows, Schedule, Shape, drop_padding
from strategies.schedules.search.best_order import blocks, by_period, paper_order_or_best

_RECIPES = (
    *blocks([(4.0, 2.0, 4.0, 2.0)], turns=[0.0], spares=[0, 1, 2, 4], patiences=[0.0, 0.5]),
    *blocks([(2.0, 4.0, 4.0, 4.0)], turns=[0.0, 2.0], spares=[0, 3], patiences=[0.0, 0.5]),
    *blocks([(1.0, 3.0, 3.0, 3.0)], turns=[0.0, 4.0], spares=[0, 3], patiences=[0.5]),
)


def order(shape: Shape) -> Rows:
    """The paper's order for equal costs and enough microbatches, else the best one found."""
    pp = shape.pp
    return paper_order_or_best(
        shape, v(pp), _regular, least=2 * pp - 1, cap=2 * pp, recipes=_RECIPES, goal=by_period
    )


def _regular(pp: int, num_microbatches: int) -> Rows:
    """The paper's phases, written for at least 2P-1 microbatches; of those, the first M."""
    whole = max(num_microbatches, 2 * pp - 1)
    shape = Shape(pp, num_microbatches, stages_per_rank=2)
    return tuple(drop_padding(_row(pp, rank, whole), shape) for rank in range(pp))


def _row(pp: int, rank: int, num_microbatches: int) -> list[Instruction]:
    """One rank's list; ``down`` is its stage on the way down the V, ``up`` on the way back."""
    down, up = rank, 2 * pp - 1 - rank
    next_of = {(kind, stage): count() for kind in (Kind.F, Kind.I, Kind.W) for stage in (down, up)}
    row: list[Instruction] = []

    def run(kind: Kind, stage: int) -> None:
        row.append(Instruction(kind, stage, next(next_of[kind, stage])))

    for _ in range(2 * (pp - rank) - 1):
        run(Kind.F, down)
    for _ in range(rank):
        run(Kind.F, up)
        run(Kind.F, down)
    for _ in range(pp - rank):
        run(Kind.F, up)
        run(Kind.I, up)
        run(Kind.W, up)
    # Behind us: 2P-r-1 forwards down, P up, P-r backwards up and none down.
    for index in range(num_microbatches - pp):
        if 2 * pp - rank - 1 + index < num_microbatches:
            run(Kind.F, down)
        run(Kind.I, down)
        run(Kind.W, down)
        run(Kind.F, up)
        run(Kind.I, up)
        run(Kind.W, up)
    for _ in range(rank):
        run(Kind.I, down)
        run(Kind.I, up)
    for _ in range(pp - rank):
        run(Kind.I, down)
        run(Kind.W, down)
    for _ in range(rank):
        run(Kind.W, up)
    for _ in range(rank):
        run(Kind.W, down)
    return row


ZB_V = Schedule(
    "zb_v", order, placement="v", stages_per_rank=2, cost_aware=True, splits_backward=True
)
