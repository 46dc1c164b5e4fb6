"""FoldX, first in first out: interleaved order, each stage's gradient reduced under later compute.

Fold3D, IEEE TPDS 34(5), https://doi.org/10.1109/tpds.2023.3247883; the order is that of
``forward_backward_pipelining_with_foldx_fifo`` in AscendSpeed.

2 ranks, 4 microbatches, 2 stages per rank, B twice as long as F; a slot is half an F, and the
second half stands below the first (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0  -  0F3 2B1  -  2F2 0B0  -
    rank 1 |  .  1F0 1F1 3F0 3B0  -  3F1 3B1  -  1F2 1B0  -  1F3 1B1

    rank 0 | 2F3 0B1  -   .  2B2  -   .  2B3  -  0B2  -  0B3  -
    rank 1 |  -  3F2 3B2  -  3F3 3B3  -  1B2  -  1B3  -   .   .

Rank r warms up with min(VM, 2(P-1-r) + (V-1)P) forwards; with M = P it runs all forwards first.
Peak: one more than the warm-up, in (stage, microbatch) pairs; VM where M = P. Time with a
reduction of A per rank: M(F+B) + (P-1)(F+B)/V + max(A/V, A - (V-1)PB/V).
Deviations: any M >= 1 (the reference wants P to divide M; see ``rounds.py``), P = 1 runs,
 and a stage's reduction starts right after its last backward, not one gradient later.
"""

from __future__ import annotations

from strategies.schedules.rounds import grouped_order
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """Groups of P microbatches; M <= P turns all forwards into warm-up, as in the reference."""
    return grouped_order(shape, shape.pp, warm_all=shape.num_microbatches <= shape.pp)


FOLDX_FIFO = Schedule("foldx_fifo", order, stages_per_rank=2, virtual_stages=True, repeats=True)
