"""What the stages of a graph hand to which others, as the runtime does it.

A tensor goes from the stage that makes it to the first stage that uses it, from there to the next
one that does, and so on (``strategies.runtime.replay.routes``): a long skip passes by the stages
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from strategies.planner.graph import UnitGraph


def handed_on(graph: UnitGraph, units_per_stage: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(source, target, size) of every pair of stages between which something travels.

    Args:
        graph: The model, its tensors in bytes or elements.
        units_per_stage: The cut, along the graph's own order.
    """
    stage_of = [stage for stage, count in enumerate(units_per_stage) for _ in range(count)]
    sums: dict[tuple[int, int], float] = {}
    for tensor in graph.tensors:
        users = {stage_of[unit] for unit in tensor.consumers}
        for ends in pairwise(sorted({stage_of[tensor.producer], *users})):
            sums[ends] = sums.get(ends, 0.0) + tensor.num_bytes
    return tuple((*ends, round(size)) for ends, size in sorted(sums.items()))


def skips(handed: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """Pairs of stages that are no neighbours."""
    return tuple((source, target) for source, target, _ in handed if target > source + 1)
