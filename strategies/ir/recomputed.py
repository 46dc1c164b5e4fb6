"""Which forwards of a program keep their input only: those whose pair has an R."""

from __future__ import annotations

from strategies.ir.instruction import Kind
from strategies.ir.program import Program


def recomputed_pairs(program: Program) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) pairs with an R anywhere in the program."""
    return frozenset(
        (item.stage, item.microbatch)
        for row in program.ranks
        for item in row
        if item.kind is Kind.R and item.microbatch is not None
    )
