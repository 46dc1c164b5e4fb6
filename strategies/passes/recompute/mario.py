"""Full recomputation, and the passes by which Mario hides it in the time in which ranks wait.

Every forward keeps its input only and is run again right before its backward:
Chen et al., 2016, https://arxiv.org/abs/1604.06174, with a whole stage as the checkpointed part. A
forward whose (stage, microbatch) has an R is the checkpointed kind; there is no other mark. Each R
carries an edge from the gradient that its backward waits for, so it starts when that has arrived:
this is what a framework does that recomputes inside its backward. Mario's passes improve it (Liu
et al., 2025, https://doi.org/10.1145/3710848.3710878); the fourth, a search, is in
``local_search``.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, Kind
from strategies.ir.program import Program

Pair = tuple[int, int]  # stage, microbatch


def apply_checkpoint(program: Program) -> Program:
    """Puts R(stage, microbatch) before the B, I or fused pair that reads what it rebuilds."""
    gradients = gradient_edges(program)
    rows = []
    for row in program.ranks:
        result: list[Instruction] = []
        for item in row:
            for part in item.parts:
                if part.kind in BACKWARD_KINDS:
                    assert part.microbatch is not None
                    edges = gradients[part.stage, part.microbatch]
                    result.append(Instruction(Kind.R, part.stage, part.microbatch, after=edges))
            result.append(item)
        rows.append(tuple(result))
    return program.with_ranks(tuple(rows))


def gradient_edges(program: Program) -> dict[Pair, tuple[Instruction, ...]]:
    """Per pair, the B or I of other stages that send it the gradient of its outputs."""
    made = {
        (part.stage, part.microbatch): part
        for row in program.ranks
        for item in row
        for part in item.parts
        if part.kind in BACKWARD_KINDS and part.microbatch is not None
    }
    edges: dict[Pair, tuple[Instruction, ...]] = dict.fromkeys(made, ())
    for boundary in program.boundaries:
        for microbatch in range(program.num_microbatches):
            maker = made.get((boundary.target, microbatch))
            if maker is not None and (boundary.source, microbatch) in edges:
                bare = Instruction(maker.kind, maker.stage, maker.microbatch)
                edges[boundary.source, microbatch] += (bare,)
    return edges


# ------------------------------------------------------------------------------- overlap recompute
# The second pass of Mario fills the time in which a rank would wait. An R keeps its place in the
# list, right before its backward; only its edge from the gradient's arrival goes, so that it
# crosses no other compute and the rank holds the full activation a little longer.


def overlap_recompute(program: Program) -> Program:
    rows = tuple(
        tuple(replace(item, after=()) if item.kind is Kind.R else item for item in row)
        for row in program.ranks
    )
    return program.with_ranks(rows)


# ------------------------------------------------------------------------------- remove redundancy
# The third pass of Mario. Where R directly follows the F of its pair, nothing runs in the time for
# which the activation is given up: the R goes, and the F keeps its graph. At first that is the last
# stage; a forward that has been moved may make more.


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
