"""ZB-H2: a longer warm-up than ZB-H1's, so that no rank waits between its first F and its last W.

Qi et al., 2024, "Zero Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241.

3 ranks, 5 microbatches, B twice as long as F, I and W one F each (``.``: idle)::

    rank 0 | 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4  .   .
    rank 1 |  .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4  .
    rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4

Rank r runs 2(P-r)-1 forwards before its first I; its W lags 2r microbatches behind its I. Peak:
min(2P-1, M) activations on every rank. For M >= 2P-1 and F = I = W the makespan is
M(F+I+W) + (P-1)F and the period, the time of a step where ranks do not wait for each other at the
flush, M(F+I+W): no bubble. Any M >= 1.

For other costs, or M < 2P-1, orders are generated as well (``best_order.py``) within 2P-1
activations per rank; the best period wins, and the best makespan among equal ones. Where all stages
cost the same, W <= F and W <= I, with latency c, the regular period is M(F+I+W) plus
(P-1)max(0, F+I+2c-2W), and less would take more memory: the last rank needs M-2P+1 of its W before
its last F. The paper's own generator (an integer program and heuristics) and its roll-back of
optimizer steps are not used.
"""

from __future__ import annotations

from strategies.ir.program import loop
from strategies.schedules.schedule import Rows, Schedule, Shape
from strategies.schedules.search.best_order import blocks, by_period, paper_order_or_best
from strategies.schedules.zb_h1 import split_1f1b

_RECIPES = blocks([(3.0, 3.0), (1.0, 1.0)], turns=[0.0], spares=[0], patiences=[0.0, 0.5])


def order(shape: Shape) -> Rows:
    """The paper's order for equal costs and enough microbatches, else the best one found."""
    pp = shape.pp
    return paper_order_or_best(
        shape,
        loop(pp, 1),
        _regular,
        least=2 * pp - 1,
        cap=2 * pp - 1,
        recipes=_RECIPES,
        goal=by_period,
    )


def _regular(pp: int, num_microbatches: int) -> Rows:
    """2(P-r)-1 forwards on rank r before its first I; then I, W of 2r microbatches ago, F."""
    return split_1f1b(
        pp,
        num_microbatches,
        warmup=lambda rank: 2 * (pp - rank - 1),
        lag=lambda rank: 2 * rank,
    )


ZB_H2 = Schedule("zb_h2", order, cost_aware=True, splits_backward=True)
