"""DualPipe: two opposed pipes whose forwards and backwards run as fused pairs; two weight copies.

DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437; https://github.com/deepseek-ai/DualPipe.

TIMELINE

Warm-up of rank r, h = min(r, P-1-r) ranks from the nearer end: P-2-2h forwards of the pipe that
starts at that end, then h+1 of each pipe in turn, then P/2-1-h times I, W and F of the other pipe.
The main part alternates F&B pairs: a forward of one pipe with a backward of the other. The second
half of the drain splits its backwards, so that I goes on at once and W fills the gaps.
Bubble for F = I = W: (P/2-1)(F&B+B-3W), as in the report; the makespan is that plus
M(F+B) - (M-P-1)(F+B-F&B), M-P-1 being the pairs of a middle rank. Where the halves of a pair are
two instructions, which need not wait for each other's inputs, the makespan is M(F+B) + (P/2-1)F.
Peak: P+1 microbatches' activations on every rank. P and M are even, M >= 2P.

Deviations: DeepSeek numbers the microbatches of each pipe by themselves; here even ones run down,
odd ones up.
"""

from __future__ import annotations

from strategies.schedules.dual_steps import dual_steps
from strategies.schedules.schedule import Rows, Schedule, Shape
from strategies.schedules.two_way import demand_pairs, mirrored


def order(shape: Shape) -> Rows:
    """The eight steps, by distance to the nearer end."""
    return mirrored(
        shape.pp,
        lambda distance: dual_steps(
            rank=distance, num_ranks=shape.pp // 2, per_way=shape.num_microbatches // 2
        ),
    )


def rule(shape: Shape) -> None:
    """P and M are even, M >= 2P."""
    demand_pairs(shape, "dualpipe", rounds=2)


DUALPIPE = Schedule(
    "dualpipe",
    order,
    "bidirectional",
    stages_per_rank=2,
    weight_copies=2,
    splits_backward=True,
    rule=rule,
)
