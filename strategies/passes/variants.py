"""The other programs that come with a training program: accumulation, and forward only."""

from __future__ import annotations

from dataclasses import replace

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import UPDATE_KINDS, Kind
from strategies.ir.program import LoopState, Program


def accumulate_only(program: Program) -> Program:
    """The same order without REDUCE and STEP: gradients stay where they are.

    A GATHER stays: this may be the first program behind an update.
    """
    rows = tuple(
        tuple(item for item in row if item.kind not in UPDATE_KINDS) for row in program.ranks
    )
    return replace(program, ranks=rows, role="accumulate")


def forward_only(program: Program) -> Program:
    """Only the forwards, in the training program's order (a projection cannot deadlock)."""
    rows = tuple(
        tuple(part for item in row for part in item.parts if part.kind is Kind.F)
        for row in program.ranks
    )
    return replace(program, ranks=rows, role="forward", entry=LoopState(), exit=LoopState())


def first_microbatches(program: Program, count: int) -> Program:
    """The program without the microbatches from ``count`` on: what a short batch runs.

    An instruction needs others of its own microbatch only, so leaving whole microbatches out of a
    compute program that can run leaves one that can. A schedule's own rule for their number
    (even, at least 2P, ...) does not have to hold for a rest.
    """
    rows = tuple(
        tuple(kept for item in row for kept in _kept(item, count)) for row in program.ranks
    )
    return replace(program, ranks=rows, num_microbatches=count)


def _kept(item: Instruction, count: int) -> tuple[Instruction, ...]:
    parts = tuple(p for p in item.parts if p.microbatch is not None and p.microbatch < count)
    if len(parts) < len(item.parts):
        return parts
    edges = tuple(e for e in item.after if e.microbatch is None or e.microbatch < count)
    return (item if edges == item.after else replace(item, after=edges),)


# ------------------------------------------------------------------------------------- fused pairs
#
# Runs the halves of fused pairs one after the other, where fusing them gains nothing.
#
# A pair waits for the inputs of both its halves and hands on both results at its end. That pays
# only if the pair is faster than the halves (communication of one under compute of the other).


def separate_pairs(program: Program) -> Program:
    """Each OVERLAP becomes its forward, followed by its backward.

    A pair's ``after`` edges hold for the forward, which comes first.
    """
    rows = []
    for row in program.ranks:
        parts = []
        for item in row:
            first, *rest = item.parts
            parts += [replace(first, after=item.after), *rest]
        rows.append(tuple(parts))
    return program.with_ranks(tuple(rows))
