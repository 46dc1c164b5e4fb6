"""Naive model parallelism: one microbatch at a time through all stages and back.

2 ranks, 2 microbatches, B twice as long as F (``-``: still running, ``.``: idle)::

    rank 0 | 0F0  .   .   .  0B0  -  0F1  .   .   .  0B1  -
    rank 1 |  .  1F0 1B0  -   .   .   .  1F1 1B1  -   .   .

Warm-up: none. Bubble ratio: 1 - 1/P. Peak: one microbatch's activations. Any M >= 1.
"""

from __future__ import annotations

from strategies.ir.instruction import backward, forward
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """Each rank: F of all its stages, then B of all its stages, microbatch after microbatch."""
    rows = []
    for rank in range(shape.pp):
        stages = [rank + chunk * shape.pp for chunk in range(shape.stages_per_rank)]
        row = []
        for microbatch in range(shape.num_microbatches):
            row += [forward(stage, microbatch) for stage in stages]
            row += [backward(stage, microbatch) for stage in reversed(stages)]
        rows.append(tuple(row))
    return tuple(rows)


NAIVE = Schedule("naive", order, virtual_stages=True)
