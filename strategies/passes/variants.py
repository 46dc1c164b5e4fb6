"""The other programs that come with a training program: accumulation, and forward only."""

from __future__ import annotations

from dataclasses import replace

from strategies.ir.instruction import Kind
from strategies.ir.program import LoopState, Program

_UPDATE = frozenset({Kind.REDUCE, Kind.GATHER, Kind.STEP})


def accumulate_only(program: Program) -> Program:
    """The same order without REDUCE and STEP: gradients stay where they are."""
    rows = tuple(tuple(item for item in row if item.kind not in _UPDATE) for row in program.ranks)
    return replace(program, ranks=rows, role="accumulate")


def forward_only(program: Program) -> Program:
    """Only the forwards, in the training program's order (a projection cannot deadlock)."""
    rows = tuple(tuple(item for item in row if item.kind is Kind.F) for row in program.ranks)
    return replace(program, ranks=rows, role="forward", entry=LoopState(), exit=LoopState())
