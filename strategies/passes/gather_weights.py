"""Adds the all-gather of each stage's weights, which the step before has updated in shares.

ZeRO stage 1 (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054): a reduction leaves each
replica the sum of its share only, the optimizer updates that share, and the weights are put
together again. The GATHERs stand at the very beginning of a rank's list, in the order in which its
stages are first used, so that all but the first run under the forwards of earlier stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.ir.instruction import Instruction, Kind
from strategies.ir.program import Program


def add_gathers(program: Program, buckets: Sequence[int]) -> Program:
    """Inserts GATHER(stage) on every owner of every stage whose gradient is reduced.

    Args:
        program: A training program, not lowered.
        buckets: Number of reduction buckets per stage; 0 where there is nothing to reduce.
    """
    turn = _turns(program)
    rows = []
    for rank, row in enumerate(program.ranks):
        stages = sorted(program.placement.stages_of(rank), key=turn.__getitem__)
        gathers = tuple(Instruction(Kind.GATHER, stage) for stage in stages if buckets[stage])
        rows.append(gathers + row)
    return program.with_ranks(tuple(rows))


def _turns(program: Program) -> dict[int, tuple[int, int]]:
    """Stage -> when any of its owners first uses it: one order for all, they gather together."""
    end = len(program.graph.nodes)
    turn = {stage: (end, stage) for stage in range(program.placement.num_stages)}
    for place, node in enumerate(program.graph.order):
        for part in program.graph.nodes[node].parts:
            if part.kind is Kind.F:
                turn[part.stage] = min(turn[part.stage], (place, part.stage))
    return turn
