"""Adds each stage's gradient reduction and optimizer step.

With overlap, a stage's REDUCE instructions stand right after its last gradient on that rank: bucket
after bucket is released inside that backward, and the channel works under the compute that follows.
Without, they carry an edge from the rank's last compute and start at the flush.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strategies.ir.instruction import Instruction, Kind
from strategies.ir.program import Program


def add_grad_reduce(program: Program, buckets: Sequence[int], *, overlap: bool) -> Program:
    """Inserts REDUCE(stage, bucket) on every owner of every stage.

    Args:
        program: A training program without reductions, not lowered.
        buckets: Number of buckets per stage; 0 where there is nothing to reduce.
        overlap: Release the buckets inside the stage's last backward, or all at the end.
    """
    rows = []
    for row in program.ranks:
        last = {i.stage: place for place, i in enumerate(row) if i.kind in (Kind.B, Kind.W)}
        ends = {place: stage for stage, place in last.items()}
        final = replace(row[max(ends)], after=())  # An edge names its instruction, no more.
        result: list[Instruction] = []
        held: list[Instruction] = []
        for place, item in enumerate(row):
            result.append(item)
            if place in ends:
                stage = ends[place]
                after = () if overlap else (final,)
                reduces = [
                    Instruction(Kind.REDUCE, stage, bucket=bucket, after=after)
                    for bucket in range(buckets[stage])
                ]
                (result if overlap else held).extend(reduces)
        rows.append(tuple(result + held))
    return program.with_ranks(tuple(rows))


def add_steps(program: Program) -> Program:
    """Appends STEP(stage) for every stage of a rank, in the order in which gradients get ready."""
    rows = []
    for row in program.ranks:
        last = {i.stage: place for place, i in enumerate(row) if i.kind in (Kind.B, Kind.W)}
        stages = sorted(last, key=last.__getitem__)
        rows.append(row + tuple(Instruction(Kind.STEP, stage) for stage in stages))
    return program.with_ranks(tuple(rows))
