"""V-Half: two stages per rank in V shape, half of 1F1B's memory.

Qi et al., 2024, "Pipeline Parallelism with Controllable Memory", https://arxiv.org/abs/2405.15362.

3 ranks, 4 microbatches, 2 stages per rank, B twice as long as F, I and W one F each; a slot is
half an F, and the second half stands below the first (``.``: idle)::

    rank 0 | 0F0 0F1  .   .   .  5F0 5I0 0F2 5W0 5F1 5I1 5W1 0I0 0W0 0F3
    rank 1 |  .  1F0 1F1  .  4F0  .   .  4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2
    rank 2 |  .   .  2F0 3F0 2F1 3F1  .   .  3I0 2I0 3W0 2F2 2W0 3F2 3I1

    rank 0 | 5F2 5I2 5W2 0I1 0W1  .  5F3 5I3 0I2 5W3 0W2  .  0I3 0W3
    rank 1 | 4W1 1F3 1I1 4I2 1W1 4F3 4W2 1I2 4I3 1W2 4W3 1I3 1W3  .
    rank 2 | 2I1 3W1 2F3 2W1 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3  .

The order repeats one microbatch's times once per period (``best_order.py``): it goes down the V
at two slots per rank and up at one, forwards and backwards alike, a slot being half an F. Ranks
that would wait fill the time with F within the memory, and with W (``greedy.py``). Rank r warms up
with what the block and the memory admit before its first gradient arrives.

Peak: at most (P+2)//2 microbatches on every rank. No closed form; for F = I = W and M >= 2P the
bubble does not depend on M and is 0.5, 2.5, 2.5, 5.5, 5.5, 8.5, 8.5 F for P = 2 to 8, as with the
paper's own code; the paper says about P(F+I+W)/2. Any M >= 1.

The block wants W+2I >= 2F and W+2F >= 2I, alike on all stages. For any costs but F = I = W without
latency, orders are generated from other blocks as well (``best_order.py``), in the same memory; the
best makespan wins.
"""

from __future__ import annotations

from functools import lru_cache

from strategies.ir.program import v
from strategies.schedules.schedule import Rows, Schedule, Shape
from strategies.schedules.search.best_order import (
    NEVER,
    blocks,
    by_makespan,
    paper_order_or_best,
    regular_order,
)

_REGULAR = blocks([(2.0, 1.0, 2.0, 1.0)], turns=range(6), spares=[2, NEVER], patiences=[0.0])
_RECIPES = (
    *blocks([(1.5, 1.5, 1.5, 1.5)], turns=[3, 2, 5], spares=[3, 2], patiences=[0.5, 0.0]),
    *blocks([(2.0, 1.0, 2.0, 1.0)], turns=[2, 3], spares=[3, 2], patiences=[0.5, 0.0]),
    *blocks([(1.0, 3.0, 3.0, 3.0)], turns=[1, 0], spares=[2, 1], patiences=[0.0]),
)


def order(shape: Shape) -> Rows:
    """The regular order for equal costs, else the best one found."""
    placement, cap = v(shape.pp), _cap(shape.pp)
    return paper_order_or_best(
        shape, placement, _regular, cap=cap, recipes=_RECIPES, goal=by_makespan
    )


@lru_cache(maxsize=64)
def _regular(pp: int, num_microbatches: int) -> Rows:
    """The paper's building block, repeated and squeezed; the best of a few turns of the V."""
    return regular_order(v(pp), num_microbatches, cap=_cap(pp), recipes=_REGULAR)


def _cap(pp: int) -> int:
    """In pairs of stage and microbatch, two of which are a rank's activations of a microbatch."""
    return 2 * ((pp + 2) // 2)


V_HALF = Schedule(
    "v_half", order, placement="v", stages_per_rank=2, cost_aware=True, splits_backward=True
)
