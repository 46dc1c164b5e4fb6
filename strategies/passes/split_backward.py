"""Splits every full backward into I and W, and lets the Ws fill the time in which ranks wait.

Only I lies on the path from stage to stage; a W can wait (Qi et al., 2023,
https://arxiv.org/abs/2401.10241). For schedules that emit no I and W of their own.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MICROBATCH_KINDS, Kind
from strategies.ir.program import Program
from strategies.schedules.schedule import Durations
from strategies.schedules.search.weight_gaps import fill_bubbles_with_w

_Pairs = frozenset[tuple[int, int | None]]


def split_backward(program: Program, durations: Durations) -> Program:
    """Every B becomes an I in its place, and a W in idle time after it, at the latest at the end.

    F and I keep the order of F and B. Not slower, under these durations, than the program in which
    each W directly follows its I; no rank holds more (stage, microbatch) pairs than the fullest
    rank of the given program, where a pair counts from its F until its W ends. A fused pair stays
    whole. An ``after`` edge to a B goes to its W, the later part: an edge names what must have
    ended.

    Raises:
        ProgramError: The program has messages or updates already.
    """
    for row in program.ranks:
        for item in row:
            if item.kind not in MICROBATCH_KINDS:
                raise ProgramError(
                    f"{program.schedule}: backwards are split before {item} is added.",
                    fix="Call split_backward on a program of F, B, I, W, R and fused pairs.",
                )
    whole = frozenset(
        (i.stage, i.microbatch) for row in program.ranks for i in row if i.kind is Kind.B
    )
    if not whole:
        return program
    rows = tuple(
        tuple(part for item in row for part in _split(item, whole)) for row in program.ranks
    )
    return fill_bubbles_with_w(program.with_ranks(rows), durations)


def _split(item: Instruction, whole: _Pairs) -> tuple[Instruction, ...]:
    item = replace(item, after=tuple(_last_part(edge, whole) for edge in item.after))
    if item.kind is not Kind.B:
        return (item,)
    return (
        replace(item, kind=Kind.I),
        Instruction(Kind.W, item.stage, item.microbatch, version=item.version),
    )


def _last_part(edge: Instruction, whole: _Pairs) -> Instruction:
    """The backward half of a fused pair keeps its name."""
    split = edge.kind is Kind.B and (edge.stage, edge.microbatch) in whole
    return replace(edge, kind=Kind.W) if split else edge
