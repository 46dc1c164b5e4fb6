"""Eager 1F1B: 1F1B with a warm-up twice as long, so that messages travel while ranks compute.

PaddlePaddle, ``pipeline_eager_1f1b.py``, https://github.com/PaddlePaddle/Paddle; the same warm-up
as "eager-1F1B" in Zhuang et al., 2022, https://arxiv.org/abs/2211.05322.

3 ranks, 5 microbatches, B twice as long as F (``-``: still running, ``.``: idle)::


Rank r runs min(2(P-r)-1, M) forwards before its first backward, and holds as many activations at
its worst moment. Bubble: (P-1)(F+B), as 1F1B. With a latency c per message 1F1B waits 2c on nearly
every microbatch; here each message has one more F and B of time to arrive, so up to
2c = F + B only the 2c(P-1) of filling and draining remain. Any M >= 1.
"""

from __future__ import annotations

from strategies.ir.instruction import backward, forward
from strategies.schedules.schedule import Rows, Schedule, Shape
from strategies.schedules.warmup import alternate


def order(shape: Shape) -> Rows:
    """2(P-1-r) forwards on rank r, then one forward and one backward in turn."""
    microbatches = range(shape.num_microbatches)
    return tuple(
        alternate(
            [forward(rank, m) for m in microbatches],
            [backward(rank, m) for m in microbatches],
            2 * (shape.pp - 1 - rank),
        )
        for rank in range(shape.pp)
    )


EAGER_1F1B = Schedule("eager_1f1b", order)
