"""1F1B: after a short warm-up, every rank alternates one forward and one backward.

Also called PipeDream-Flush. Narayanan et al., 2021, https://arxiv.org/abs/2006.09503.

3 ranks, 4 microbatches, B twice as long as F (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F1 0F2  .   .   .   .  0B0  -  0F3 0B1  -   .  0B2  -   .  0B3  -
    rank 1 |  .  1F0 1F1  .   .  1B0  -  1F2 1B1  -  1F3 1B2  -   .  1B3  -   .   .
    rank 2 |  .   .  2F0 2B0  -  2F1 2B1  -  2F2 2B2  -  2F3 2B3  -   .   .   .   .

Rank r warms up with min(P-r-1, M) forwards, so it holds at most min(P-r, M) activations.
Bubble ratio: (P-1) / (M+P-1). Any M >= 1, also M < P.
"""

from __future__ import annotations

from strategies.ir.instruction import backward, forward
from strategies.schedules.schedule import Rows, Schedule, Shape, one_forward_one_backward


def order(shape: Shape) -> Rows:
    """Warm-up of P-r-1 forwards on rank r, then 1F1B."""
    microbatches = range(shape.num_microbatches)
    return tuple(
        one_forward_one_backward(
            [forward(rank, m) for m in microbatches],
            [backward(rank, m) for m in microbatches],
            shape.pp - rank - 1,
        )
        for rank in range(shape.pp)
    )


ONE_F_ONE_B = Schedule("1f1b", order, repeats=True)
