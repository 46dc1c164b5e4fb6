"""DualPipeV: DualPipe cut in half at its fold; one weight copy, stages placed in a V.

DeepSeek-AI, 2025, https://github.com/deepseek-ai/DualPipe; the cut is that of Qi et al.,
https://hackmd.io/@ufotalent/r1lVXsa9Jg.

2 ranks, 4 microbatches, 2 stages per rank, B twice as long as F, nothing gained by fusing; a slot
is half an F, and the second half stands below the first (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1  -  3F2 0B0  -
    rank 1 |  .  1F0 2F0 1F1 2F1 1F2 2B0  -  2F2 1B0  -  1F3 2B1

    rank 0 | 3B2  -  3F3  .  0B1  -  3B3  -  0I2 0W2 0I3 0W3
    rank 1 |  -  2F3 1B1  -  2B2  -  1B2  -  2I3 1I3 2W3 1W3

Warm-up of rank r: 2(P-1-r) forwards on the way out, then r+1 on each way in turn, then P-1-r times
I, W and F on the way back. Main part and drain are those of DualPipe, see ``dualpipe.py``.
Bubble for F = I = W: (P-1)(F&B+B-3W)/2, DualPipe's with P doubled and stages half as long; the
makespan is that plus M(F+B) - (2(M-P)-1)(F+B-F&B)/2, the last rank running 2(M-P)-1 pairs. Where
the halves of a pair are two instructions, the makespan is M(F+B) + (P-1)F/2, that of zb_v.
Peak: P + 1/2 microbatches' activations on every rank. M >= 2P. The order is that of
torch.distributed.pipelining's ScheduleDualPipeV.
"""

from __future__ import annotations

from strategies.errors import PlanError
from strategies.schedules.bidirectional import dualpipe_steps, number_steps
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """The eight steps; way 0 goes out through stage r, way 1 comes back through 2P-1-r."""
    return tuple(
        number_steps(
            dualpipe_steps(rank=rank, num_ranks=shape.pp, per_way=shape.num_microbatches),
            stages=(rank, 2 * shape.pp - 1 - rank),
            microbatch=lambda _, index: index,
        )
        for rank in range(shape.pp)
    )


def rule(shape: Shape) -> None:
    if shape.num_microbatches < 2 * shape.pp:
        raise PlanError(
            f"num_microbatches={shape.num_microbatches}: dualpipe_v fills a V of {2 * shape.pp} "
            f"stages before its first fused pair and needs num_microbatches >= 2 * pp. "
            f"Try num_microbatches={2 * shape.pp}."
        )


DUALPIPE_V = Schedule("dualpipe_v", order, "v", stages_per_rank=2, splits_backward=True, rule=rule)
