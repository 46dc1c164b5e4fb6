"""ZB-H1: 1F1B with a split backward; weight gradients fill the drain.

Qi et al., 2024, "Zero Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241.

3 ranks, 4 microbatches, B twice as long as F, I and W one F each (``.``: idle)::

    rank 0 | 0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 |  .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

Rank r warms up with P-r-1 forwards, like 1F1B; its W lags r microbatches behind its I. Peak:
min(P, M) activations on every rank, 1F1B's first. For M >= 2P, W <= F, W <= I, no latency
and all stages alike, the makespan is M(F+I+W) + (P-1)(F+I-W). Any M >= 1.

For other costs, or M < 2P-1, orders are generated as well (``best_order.py``) within P activations
per rank; the best makespan wins. Where the formula above holds, this memory leaves nothing to win:
rank 0 runs P forwards, waits for the first gradient, and can begin each of the other M-P forwards
only after one more I and W; the last of them then has to go down the pipeline and back.
The paper's own generator (an integer program and heuristics) is not used.
"""

from __future__ import annotations

from collections.abc import Callable

from strategies.ir.instruction import forward, input_gradient, weight_gradient
from strategies.ir.program import loop
from strategies.schedules.schedule import Rows, Schedule, Shape
from strategies.schedules.search.best_order import blocks, by_makespan, paper_order_or_best

_RECIPES = blocks([(3.0, 3.0), (1.5, 1.5)], turns=[0.0], spares=[0, 1], patiences=[0.5])


def order(shape: Shape) -> Rows:
    """The paper's order for equal costs and enough microbatches, else the best one found."""
    pp = shape.pp
    return paper_order_or_best(
        shape, loop(pp, 1), _regular, least=2 * pp - 1, cap=pp, recipes=_RECIPES, goal=by_makespan
    )


def _regular(pp: int, num_microbatches: int) -> Rows:
    """Warm-up of P-r-1 forwards on rank r, then F, I, and the W of r microbatches ago."""
    return split_1f1b(
        pp, num_microbatches, warmup=lambda rank: pp - rank - 1, lag=lambda rank: rank
    )


ZB_H1 = Schedule("zb_h1", order, cost_aware=True, splits_backward=True)


# -------------------------------------------------------------------------------------- split 1f1b
# 1F1B with a split backward: what ZB-H1 and ZB-H2 share; they differ in two numbers per rank.


def split_1f1b(
    pp: int, num_microbatches: int, *, warmup: Callable[[int], int], lag: Callable[[int], int]
) -> Rows:
    """Warm-up, then one forward and one input gradient in turn; weight gradients follow later.

    Rank r holds at most warmup(r) + lag(r) + 1 activations: a W runs right after the I that is
    ``lag(r)`` microbatches younger.
    """
    rows = []
    for rank in range(pp):
        ahead = min(warmup(rank), num_microbatches)
        row = [forward(rank, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if ahead + m < num_microbatches:
                row.append(forward(rank, ahead + m))
            row.append(input_gradient(rank, m))
            if m >= lag(rank):
                row.append(weight_gradient(rank, m - lag(rank)))
        first_left = max(0, num_microbatches - lag(rank))
        row += [weight_gradient(rank, m) for m in range(first_left, num_microbatches)]
        rows.append(tuple(row))
    return tuple(rows)
