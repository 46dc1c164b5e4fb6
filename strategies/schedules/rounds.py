"""Groups of microbatches that cross all virtual stages of a rank before the next group starts.

The one order behind interleaved 1F1B (group N = P), Fold's fifo (N = P) and aiao (N = M).

Where N does not divide M, the order is that of the next multiple of N with the microbatches that do
not exist left out. (A last group that is simply cut short deadlocks: P=4, V=3, M=5, N=4.)
"""

from __future__ import annotations

from strategies.ir.instruction import backward, forward
from strategies.schedules.schedule import Rows, Shape, drop_padding, one_forward_one_backward


def grouped_order(shape: Shape, group: int, *, warm_all: bool = False) -> Rows:
    """Warm-up of 2(P-1-r) + (V-1)N forwards, then one forward and one backward in turn.

    ``group`` is N >= 1; with ``warm_all`` all forwards come first.

    >>> rows = grouped_order(Shape(pp=1, num_microbatches=3, stages_per_rank=2), 2)
    >>> " ".join(map(str, rows[0]))
    '0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0B1 1F2 1B2 0B2'
    """
    padded = -(-shape.num_microbatches // group) * group
    # Chunk 0 for N microbatches, then chunk 1, ..., then the next N.
    cells = [
        (chunk, microbatch)
        for start in range(0, padded, group)
        for chunk in range(shape.stages_per_rank)
        for microbatch in range(start, start + group)
    ]
    last = shape.stages_per_rank - 1
    rows = []
    for rank in range(shape.pp):
        warmup = 2 * (shape.pp - 1 - rank) + last * group
        row = one_forward_one_backward(
            [forward(rank + chunk * shape.pp, microbatch) for chunk, microbatch in cells],
            [backward(rank + (last - chunk) * shape.pp, microbatch) for chunk, microbatch in cells],
            len(cells) if warm_all else warmup,
        )
        rows.append(row if padded == shape.num_microbatches else drop_padding(row, shape))
    return tuple(rows)
