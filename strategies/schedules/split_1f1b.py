"""1F1B with a split backward: what ZB-H1 and ZB-H2 share; they differ in two numbers per rank."""

from __future__ import annotations

from collections.abc import Callable

from strategies.ir.instruction import forward, input_gradient, weight_gradient
from strategies.schedules.schedule import Rows


def split_1f1b(
    pp: int, num_microbatches: int, *, warmup: Callable[[int], int], lag: Callable[[int], int]
) -> Rows:
    """Warm-up, then one forward and one input gradient in turn; weight gradients follow later.

    Rank r holds at most warmup(r) + lag(r) + 1 activations: a W runs right after the I that is
    ``lag(r)`` microbatches younger.

    Args:
        pp: P.
        num_microbatches: M.
        warmup: Rank -> forwards before the first F, I pair.
        lag: Rank -> how many more I than W the rank has run in its steady state.
    """
    rows = []
    for rank in range(pp):
        ahead = min(warmup(rank), num_microbatches)
        row = [forward(rank, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if ahead + m < num_microbatches:
                row.append(forward(rank, ahead + m))
            row.append(input_gradient(rank, m))
            if m >= lag(rank):
                row.append(weight_gradient(rank, m - lag(rank)))
        first_left = max(0, num_microbatches - lag(rank))
        row += [weight_gradient(rank, m) for m in range(first_left, num_microbatches)]
        rows.append(tuple(row))
    return tuple(rows)
