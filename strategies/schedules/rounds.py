"""Groups of microbatches that cross all virtual stages of a rank before the next group starts.

The one order behind interleaved 1F1B (group N = P), Fold's fifo (N = P) and aiao (N = M).

Where N does not divide M, the order is that of the next multiple of N with the microbatches that do
not exist left out. An instruction needs others of its own microbatch only, so leaving whole
microbatches out of a program without deadlock leaves one without deadlock. (A last group that is
simply cut short does deadlock: P=4, V=3, M=5, N=4.)
"""

from __future__ import annotations

from strategies.ir.instruction import Instruction, backward, forward
from strategies.schedules.schedule import Rows, Shape, alternate


def grouped_order(shape: Shape, group: int, *, warm_all: bool = False) -> Rows:
    """Warm-up of 2(P-1-r) + (V-1)N forwards, then one forward and one backward in turn.

    Args:
        shape: P, M, V.
        group: N >= 1.
        warm_all: All forwards first.

    >>> rows = grouped_order(Shape(pp=1, num_microbatches=3, stages_per_rank=2), 2)
    >>> " ".join(map(str, rows[0]))
    '0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0B1 1F2 1B2 0B2'
    """
    padded = -(-shape.num_microbatches // group) * group
    rows = []
    for rank in range(shape.pp):
        forwards = _chunks(shape, group, padded)
        backwards = [
            backward(rank + (shape.stages_per_rank - 1 - chunk) * shape.pp, microbatch)
            for chunk, microbatch in forwards
        ]
        warmup = 2 * (shape.pp - 1 - rank) + (shape.stages_per_rank - 1) * group
        row = alternate(
            [forward(rank + chunk * shape.pp, microbatch) for chunk, microbatch in forwards],
            backwards,
            len(forwards) if warm_all else warmup,
        )
        rows.append(tuple(item for item in row if _exists(item, shape)))
    return tuple(rows)


def _chunks(shape: Shape, group: int, padded: int) -> list[tuple[int, int]]:
    """(chunk, microbatch): chunk 0 for N microbatches, then chunk 1, ..., then the next N."""
    return [
        (chunk, microbatch)
        for start in range(0, padded, group)
        for chunk in range(shape.stages_per_rank)
        for microbatch in range(start, start + group)
    ]


def _exists(item: Instruction, shape: Shape) -> bool:
    return item.microbatch is not None and item.microbatch < shape.num_microbatches
