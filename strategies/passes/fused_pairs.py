"""Runs the halves of fused pairs one after the other, where fusing them gains nothing.

A pair waits for the inputs of both its halves and hands on both results at its end. That pays only
if the pair is faster than the halves (communication of one under compute of the other).
"""

from __future__ import annotations

from dataclasses import replace

from strategies.ir.program import Program


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
