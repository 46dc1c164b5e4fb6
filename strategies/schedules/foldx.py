"""Fold with the group size N as its knob: as fast as aiao at a fraction of its memory.

Fold3D, IEEE TPDS 34(5), https://doi.org/10.1109/tpds.2023.3247883, whose two modes are the two ends
of the knob: N = P is fifo, N = M is aiao with its backwards brought forward. In between, N
microbatches run through all stages of a rank, then the next N (Megatron's
``microbatch_group_size_per_vp_stage``, there set by hand).

2 ranks, 4 microbatches, 2 stages per rank, B twice as long as F, nothing to reduce, so that N = 2
holds least; a slot is half an F, and the second half stands below the first (``-``: still running,
``.``: idle)::

    rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0  -  0F3 2B1  -  2F2 0B0  -
    rank 1 |  .  1F0 1F1 3F0 3B0  -  3F1 3B1  -  1F2 1B0  -  1F3 1B1

    rank 0 | 2F3 0B1  -   .  2B2  -   .  2B3  -  0B2  -  0B3  -
    rank 1 |  -  3F2 3B2  -  3F3 3B3  -  1B2  -  1B3  -   .   .

``schedule.group=auto`` simulates every N from P to M with the run's own costs and buckets and takes
the one of least peak whose time is minimal (see ``group_choice.py``); the last group may be short.
Rank r warms up with 2(P-1-r) + (V-1)N forwards. Peak on rank r: (2(P-1-r) + (V-1)N + 1)/V
microbatches, at most M. Time with a reduction of A per rank:
M(F+B) + (P-1)(F+B)/V + max(A/V, A - (V-1)NB/V) where N divides M; else the last group's size
stands for N. Any M >= 1.
"""

from __future__ import annotations

from strategies.schedules.rounds import grouped_order
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """Groups of N microbatches; the compiler has filled in N where it was to be chosen."""
    return grouped_order(shape, shape.group or shape.pp)


FOLDX = Schedule(
    "foldx", order, stages_per_rank=2, virtual_stages=True, grouped=True, chooses_group=True
)
