"""Every forward keeps its input only and is run again right before its backward.

Chen et al., 2016, https://arxiv.org/abs/1604.06174, with a whole stage as the checkpointed part. A
forward whose (stage, microbatch) has an R is the checkpointed kind; there is no other mark. Each R
carries an edge from the gradient that its backward waits for, so it starts when that has arrived:
this is what a framework does that recomputes inside its backward, and what the next pass improves.
"""

from __future__ import annotations

from strategies.ir.instruction import BACKWARD_KINDS, Instruction, Kind
from strategies.ir.program import Program

Pair = tuple[int, int]  # stage, microbatch


def apply_checkpoint(program: Program) -> Program:
    """Puts R(stage, microbatch) before the B, I or fused pair that reads what it rebuilds.

    Args:
        program: Compute only: no messages, no updates, no R.
    """
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
