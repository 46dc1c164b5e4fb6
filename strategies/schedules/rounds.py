"""Groups of microbatches that cross all virtual stages of a rank before the next group starts.

The one order behind interleaved 1F1B (group N = P), Fold's fifo (N = P) and aiao (N = M).

Where N does not divide M, the order is that of the next multiple of N with the microbatches that do
not exist left out. (A last group that is simply cut short deadlocks: P=4, V=3, M=5, N=4.)
"""

from __future__ import annotations

from operator import sub

from strategies.ir.instruction import backward, forward
from strategies.schedules.schedule import Held, Rows, Shape, alternate, existing


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
        row = alternate(
            [forward(rank + chunk * shape.pp, microbatch) for chunk, microbatch in cells],
            [backward(rank + (last - chunk) * shape.pp, microbatch) for chunk, microbatch in cells],
            len(cells) if warm_all else warmup,
        )
        rows.append(row if padded == shape.num_microbatches else existing(row, shape))
    return tuple(rows)


def held_in_groups(shape: Shape, rank: int, group: int, *, warm_all: bool = False) -> Held:
    """What a rank holds in front of its backwards, without the order's lists.

    How much a chunk holds rises or falls by one with every pair of instructions, or stays, until
    one of them enters another chunk: between two such moments no sum of all of them is at its
    most. What is held repeats itself with every group.

    >>> held_in_groups(Shape(pp=1, num_microbatches=3, stages_per_rank=2), 0, 2)
    (((2, 1), 1), ((3, 0), 0), ((2, 0), 0), ((1, 1), 1), ((1, 0), 0))
    """
    count, chunks = shape.num_microbatches, shape.stages_per_rank
    per_group = group * chunks
    total = -(-count // group) * per_group
    warmup = 2 * (shape.pp - 1 - rank) + (chunks - 1) * group
    warmup = total if warm_all else min(warmup, total)
    steady = warmup + 1 + per_group <= count // group * per_group
    most = per_group if steady else total
    # The first and the last cell of a chunk that are there, in groups that may be short.
    left = count % group
    edges = {0, group - 1, *((left, left - 1, left - 2) if left else ())}
    begins = range(0, most + group, group)
    moments = {at + edge - more for at in begins for edge in edges for more in (0, warmup % group)}
    found = []
    for backwards in sorted(moments):
        if 0 <= backwards < most:
            forwards = min(warmup + 1 + backwards, total)
            held = _cells(forwards, count, group, chunks)
            gone = _cells(backwards, count, group, chunks)
            whole = tuple(map(sub, held, reversed(gone)))
            chunk = chunks - 1 - backwards % per_group // group
            if whole[chunk] > 0:
                found.append((whole, chunk))
    return tuple(dict.fromkeys(found))


def _cells(number: int, count: int, group: int, chunks: int) -> list[int]:
    """Of the first so many cells of an order, microbatches per chunk, without those beyond M."""
    full, more = divmod(number, group * chunks)
    begun, part = divmod(more, group)
    done, here = min(full * group, count), min(group, max(0, count - full * group))
    found = [done + here] * begun + [done] * (chunks - begun)
    found[begun] += min(part, here)
    return found
