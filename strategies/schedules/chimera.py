"""Chimera: two opposed pipes over the same ranks fill each other's bubbles; two weight copies.

Li and Hoefler, 2021, https://arxiv.org/abs/2107.06925.

4 ranks, 4 microbatches, B twice as long as F (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F2  .  3F1 3B1  -  3F3 3B3  -   .  0B0  -   .   .  0B2  -
    rank 1 |  .  1F0 2F1 1F2 2F3  .  2B1  -  1B0  -  2B3  -  1B2  -   .   .
    rank 2 |  .  1F1 2F0 1F3 2F2  .  2B0  -  1B1  -  2B2  -  1B3  -   .   .
    rank 3 | 0F1 0F3  .  3F0 3B0  -  3F2 3B2  -   .  0B1  -   .   .  0B3  -

Warm-up of rank r, h = min(r, P-1-r) ranks from the nearer end: P-2-2h forwards of the pipe that
starts at that end, then h+1 of each pipe in turn; from there on backwards and forwards alternate.
Makespan: M(F+B) + (P-2)max(F,B) for M >= P (1F1B's bubble is (P-1)(F+B)), and PF + (M+P-2)B for
M < P and B >= F. Peak: P microbatches' activations on every rank for M >= 2P-2, P/2+h+1 for M = P.
P and M are even; any such M, also M < P.

For M <= P this is the paper's unit: two 1F1B pipes of M/2 microbatches, merged. Deviation: for
M > P the paper concatenates units, which leaves bubbles between them where B > F (or doubles the
forwards against them, at twice the memory); here one pattern goes on at no further bubble.
"""

from __future__ import annotations

from strategies.schedules.bidirectional import mirrored, require_even
from strategies.schedules.schedule import Rows, Schedule, Shape, drop_padding


def order(shape: Shape) -> Rows:
    """The pattern of each rank; for a small M that of 2P without what does not exist."""
    half = shape.pp // 2
    per_pipe = max(shape.num_microbatches, 2 * shape.pp) // 2

    def steps(distance: int) -> list[str]:
        inner = half - 1 - distance  # Ranks between this one and the middle.
        return [
            *["F0"] * (2 * inner),
            *["F0", "F1"] * (distance + 1),
            *["B1", "F1"] * inner,
            # Backward first: it frees what the forward takes, so P activations are enough.
            *["B1", "F0", "B0", "F1"] * (per_pipe - shape.pp + distance + 1),
            *["B1", "B0", "F1"] * inner,
            *["B1", "B0"] * (distance + 1),
            *["B0"] * inner,
        ]

    return tuple(drop_padding(row, shape) for row in mirrored(shape.pp, steps))


def rule(shape: Shape) -> None:
    require_even(shape, "chimera")


CHIMERA = Schedule("chimera", order, "bidirectional", stages_per_rank=2, repeats=True, rule=rule)
