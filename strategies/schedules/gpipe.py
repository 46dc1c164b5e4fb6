"""GPipe: all forwards, then all backwards.

Huang et al., 2019, https://arxiv.org/abs/1811.06965.

2 ranks, 3 microbatches, B twice as long as F (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F1 0F2  .   .   .  0B0  -  0B1  -  0B2  -
    rank 1 |  .  1F0 1F1 1F2 1B0  -  1B1  -  1B2  -   .   .

Warm-up: all M forwards. Bubble ratio: (P-1) / (M+P-1). Peak: M microbatches' activations on every
rank. Any M >= 1. The paper's backwards run in descending order; here they ascend, as in
torch.distributed.pipelining, which frees the oldest activations first at the same makespan.
"""

from __future__ import annotations

from strategies.ir.instruction import backward, forward
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """F of all microbatches, then B of all microbatches, both ascending."""
    microbatches = range(shape.num_microbatches)
    return tuple(
        tuple([forward(rank, m) for m in microbatches] + [backward(rank, m) for m in microbatches])
        for rank in range(shape.pp)
    )


GPIPE = Schedule("gpipe", order)
