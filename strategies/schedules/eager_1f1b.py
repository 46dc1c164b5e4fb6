"""Eager 1F1B: 1F1B with a warm-up twice as long, so that messages travel while ranks compute.

PaddlePaddle, ``pipeline_eager_1f1b.py``, https://github.com/PaddlePaddle/Paddle; the same warm-up
as "eager-1F1B" in Zhuang et al., 2022, https://arxiv.org/abs/2211.05322.

3 ranks, 5 microbatches, B twice as long as F (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F1 0F2 0F3 0F4  .   .  0B0  -   .  0B1  -   .  0B2  -   .  0B3  -   .  0B4  -
    rank 1 |  .  1F0 1F1 1F2  .  1B0  -  1F3 1B1  -  1F4 1B2  -   .  1B3  -   .  1B4  -   .   .
    rank 2 |  .   .  2F0 2B0  -  2F1 2B1  -  2F2 2B2  -  2F3 2B3  -  2F4 2B4  -   .   .   .   .

Rank r runs min(2(P-r)-1, M) forwards before its first backward, and holds as many activations at
its worst moment. Bubble: (P-1)(F+B), as 1F1B. With a latency c per message 1F1B waits 2c on nearly
every microbatch; here each message has one more F and B of time to arrive, so up to
2c = F + B only the 2c(P-1) of filling and draining remain. Any M >= 1.
"""

from __future__ import annotations

from strategies.ir.instruction import backward, forward
from strategies.schedules.schedule import Rows, Schedule, Shape, one_forward_one_backward


def order(shape: Shape) -> Rows:
    """2(P-1-r) forwards on rank r, then one forward and one backward in turn."""
    microbatches = range(shape.num_microbatches)
    return tuple(
        one_forward_one_backward(
            [forward(rank, m) for m in microbatches],
            [backward(rank, m) for m in microbatches],
            2 * (shape.pp - 1 - rank),
        )
        for rank in range(shape.pp)
    )


EAGER_1F1B = Schedule("eager_1f1b", order, repeats=True)
