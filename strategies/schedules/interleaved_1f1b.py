"""Interleaved 1F1B: each rank holds V stages that are P apart, so the bubble shrinks V-fold.

Narayanan et al., 2021, https://arxiv.org/abs/2104.04473 (Megatron-LM, "virtual pipeline").

2 ranks, 4 microbatches, 2 stages per rank, B twice as long as F; a slot is half an F, and the
second half stands below the first (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0  -  0F3 2B1  -  2F2 0B0  -
    rank 1 |  .  1F0 1F1 3F0 3B0  -  3F1 3B1  -  1F2 1B0  -  1F3 1B1

    rank 0 | 2F3 0B1  -   .  2B2  -   .  2B3  -  0B2  -  0B3  -
    rank 1 |  -  3F2 3B2  -  3F3 3B3  -  1B2  -  1B3  -   .   .

Rank r warms up with 2(P-1-r) + (V-1)N forwards, N = ``schedule.group`` (Megatron's
``microbatch_group_size_per_vp_stage``). Default: the least N >= P that leaves no last group smaller
than P; then no order with these stages is faster. Bubble: (P-1)(F+B)/V. Peak on rank r:
(2(P-1-r) + (V-1)N + 1)/V microbatches. Any M >= 1 (Megatron wants N to divide M; see
``rounds.py``).
"""

from __future__ import annotations

from strategies.schedules.rounds import grouped_order
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """Groups of N microbatches through all chunks, warm-up, then one forward, one backward."""
    return grouped_order(shape, shape.group or shape.pp)


INTERLEAVED_1F1B = Schedule(
    "interleaved_1f1b", order, stages_per_rank=2, virtual_stages=True, grouped=True, repeats=True
)
