"""A forward that is recomputed at once is not checkpointed in the first place.

The third pass of Mario. Where R directly follows the F of its pair, nothing runs in the time for
which the activation is given up: the R goes, and the F keeps its graph. At first that is the last
stage; a forward that has been moved may make more.
"""

from __future__ import annotations

from strategies.ir.instruction import Instruction, Kind
from strategies.ir.program import Program


def remove_redundancy(program: Program) -> Program:
    """Drops every R whose F stands directly before it."""
    return program.with_ranks(tuple(map(_kept, program.ranks)))


def _kept(row: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    kept: list[Instruction] = []
    for item in row:
        before = kept[-1] if kept else None
        redundant = (
            item.kind is Kind.R
            and before is not None
            and before.kind is Kind.F
            and (before.stage, before.microbatch) == (item.stage, item.microbatch)
        )
        if not redundant:
            kept.append(item)
    return tuple(kept)
