"""DualPipe: two opposed pipes whose forwards and backwards run as fused pairs; two weight copies.

DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437; https://github.com/deepseek-ai/DualPipe.

4 ranks, 8 microbatches, B twice as long as F, nothing gained by fusing (``-``: still running,
``.``: idle)::

    rank 0 | 0F0 0F2 0F4 3F1 3I1 3W1 3F3 0F6 3B3  -  3F5 0B0  -
    rank 1 |  .  1F0 2F1 1F2 2F3 1F4 2B1  -  2F5 1B0  -  1F6 2B3
    rank 2 |  .  1F1 2F0 1F3 2F2 1F5 2B0  -  2F4 1B1  -  1F7 2B2
    rank 3 | 0F1 0F3 0F5 3F0 3I0 3W0 3F2 0F7 3B2  -  3F4 0B1  -

    rank 0 | 3B5  -  3F7  .  0B2  -  3B7  -  0I4 0W4 0I6 0W6
    rank 1 |  -  2F7 1B2  -  2B5  -  1B4  -  2I7 1I6 2W7 1W6
    rank 2 |  -  2F6 1B3  -  2B4  -  1B5  -  2I6 1I7 2W6 1W7
    rank 3 | 3B4  -  3F6  .  0B3  -  3B6  -  0I5 0W5 0I7 0W7

Warm-up of rank r, h = min(r, P-1-r) ranks from the nearer end: P-2-2h forwards of the pipe that
starts at that end, then h+1 of each pipe in turn, then P/2-1-h times I, W and F of the other pipe.
The main part alternates F&B pairs: a forward of one pipe with a backward of the other (an OVERLAP
instruction where the costs say that fusing gains). The second
half of the drain splits its backwards, so that I goes on at once and W fills the gaps.
Bubble for F = I = W: (P/2-1)(F&B+B-3W), as in the report; the makespan is that plus
M(F+B) - (M-P-1)(F+B-F&B), M-P-1 being the pairs of a middle rank. Where the halves of a pair are
two instructions, which need not wait for each other's inputs, the makespan is M(F+B) + (P/2-1)F.
Peak: P+1 microbatches' activations on every rank. P and M are even, M >= 2P.

Deviations: DeepSeek numbers the microbatches of each pipe by themselves; here even ones run down,
odd ones up.
"""

from __future__ import annotations

from strategies.schedules.bidirectional import dualpipe_steps, mirrored, require_even
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """The eight steps, by distance to the nearer end."""
    return mirrored(
        shape.pp,
        lambda distance: dualpipe_steps(
            rank=distance, num_ranks=shape.pp // 2, per_way=shape.num_microbatches // 2
        ),
    )


def rule(shape: Shape) -> None:
    require_even(shape, "dualpipe", rounds=2)


DUALPIPE = Schedule(
    "dualpipe",
    order,
    "bidirectional",
    stages_per_rank=2,
    splits_backward=True,
    rule=rule,
)
