"""Fold, all in, all out: every chunk runs all microbatches before the next chunk starts.

Fold3D, IEEE TPDS 34(5), https://doi.org/10.1109/tpds.2023.3247883; the order is that of
``forward_backward_pipelining_with_foldx_aiao`` in AscendSpeed.

2 ranks, 4 microbatches, 2 stages per rank, B twice as long as F; a slot is half an F, and the
second half stands below the first (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3  .   .   .  2B0  -  2B1
    rank 1 |  .  1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0  -  3B1  -  3B2

    rank 0 |  -  2B2  -  2B3  -  0B0  -  0B1  -  0B2  -  0B3  -
    rank 1 |  -  3B3  -  1B0  -  1B1  -  1B2  -  1B3  -   .   .

Warm-up: all VM forwards. Backward: last chunk first, microbatches ascending; the reductions of
V-1 of the V chunks run under the chunks that remain. Peak: M microbatches on every rank. Time with
a reduction of A per rank: M(F+B) + (P-1)(F+B)/V + max(A/V, A - (V-1)MB/V). Any M >= 1 (where
M < P a chunk waits for its predecessor, and the closed form does not hold).
"""

from __future__ import annotations

from strategies.schedules.rounds import grouped_order
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """All forwards chunk by chunk, then all backwards chunk by chunk."""
    return grouped_order(shape, shape.num_microbatches, warm_all=True)


FOLDX_AIAO = Schedule("foldx_aiao", order, stages_per_rank=2, virtual_stages=True)
