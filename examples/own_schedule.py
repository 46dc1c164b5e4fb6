r"""A schedule of one's own in 20 lines: everything in pairs, which hides what messages take.

A rank that is warm runs two forwards, then two backwards, so that a message has the time of one
instruction to arrive. The compiler adds messages, reductions and the optimizer's steps, and proves
that the order can run before anything does. Simulated beside 1F1B, and trained with:

    python -m launcher mode=simulate costs=uniform costs.p2p=0.5 pp=4 schedule=1f1b
    python -m launcher mode=simulate costs=uniform costs.p2p=0.5 pp=4 schedule=custom \
        schedule.path=own_schedule.py:pairs
    python -m launcher pp=4 schedule=custom schedule.path=own_schedule.py:pairs
"""

from strategies.ir.instruction import backward, forward


def pairs(shape):
    rows = []
    for rank in range(shape.pp):
        forwards = [forward(rank, m) for m in range(shape.num_microbatches)]
        backwards = [backward(rank, m) for m in range(shape.num_microbatches)]
        warm = min(2 * (shape.pp - rank), len(forwards))
        row, forwards = forwards[:warm], forwards[warm:]
        while backwards:
            row, backwards = row + backwards[:2], backwards[2:]
            row, forwards = row + forwards[:2], forwards[2:]
        rows.append(tuple(row))
    return tuple(rows)
