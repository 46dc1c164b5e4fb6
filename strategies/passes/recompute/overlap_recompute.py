"""Recomputation no longer waits for the gradient: it fills the time in which the rank would wait.

The second pass of Mario (Liu et al., 2025, https://doi.org/10.1145/3710848.3710878). An R keeps its
place in the list, right before its backward; only its edge from the gradient's arrival goes, so
that it crosses no other compute and the rank holds the full activation a little longer.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.ir.instruction import Kind
from strategies.ir.program import Program


def overlap_recompute(program: Program) -> Program:
    """Every R starts as soon as its rank has got to it."""
    rows = tuple(
        tuple(replace(item, after=()) if item.kind is Kind.R else item for item in row)
        for row in program.ranks
    )
    return program.with_ranks(rows)
