"""Breadth-first pipeline: every virtual stage runs all microbatches before the next one starts.

Lamy-Poirier, 2022, https://arxiv.org/abs/2211.05953; the order is that of ``ScheduleLoopedBFS`` in
torch.distributed.pipelining.

2 ranks, 4 microbatches, 2 stages per rank, B twice as long as F; a slot is half an F, and the
second half stands below the first (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3  .   .   .  2B3  -  2B2
    rank 1 |  .  1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3  -  3B2  -  3B1

    rank 0 |  -  2B1  -  2B0  -  0B3  -  0B2  -  0B1  -  0B0  -
    rank 1 |  -  3B0  -  1B3  -  1B2  -  1B1  -  1B0  -   .   .

Warm-up: all VM forwards. Backward: last stage first, microbatches descending (``foldx_aiao`` is the
same with ascending ones). Bubble: (P-1)(F+B)/V for M >= P; fewer microbatches than ranks leave gaps
between the stages. Peak: M microbatches on every rank. Any M >= 1.
"""

from __future__ import annotations

from strategies.ir.instruction import backward, forward
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """All forwards stage by stage, then the same list backwards."""
    rows = []
    for rank in range(shape.pp):
        cells = [
            (rank + chunk * shape.pp, microbatch)
            for chunk in range(shape.stages_per_rank)
            for microbatch in range(shape.num_microbatches)
        ]
        forwards = [forward(*cell) for cell in cells]
        rows.append(tuple(forwards + [backward(*cell) for cell in reversed(cells)]))
    return tuple(rows)


LOOPED_BFS = Schedule("looped_bfs", order, stages_per_rank=2, virtual_stages=True)
