"""Guides made of one microbatch's times, repeated once per period.

Qi et al., 2024, "Pipeline Parallelism with Controllable Memory", https://arxiv.org/abs/2405.15362:
how long a microbatch stays on a rank, counted in periods, is what the rank must hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.schedules.greedy import Guide
from strategies.schedules.lanes import F, I, Lanes
from strategies.schedules.replay import next_of
from strategies.schedules.schedule import Durations


@dataclass(frozen=True, slots=True)
class Block:
    """How fast a microbatch travels; a slot is the period over 3V, which is F where F = I = W.

    Attributes:
        hops: Slots from one rank to the next, per row of stages: the F of each row, then the I from
            the last row to the first. A hop never takes less than what is run and sent.
        turn: Slots that pass between the last forward and the first backward.
    """

    hops: tuple[float, ...]
    turn: float = 0.0


def repeat(block: Block, lanes: Lanes, durations: Durations) -> Guide:
    """The guide by which one microbatch enters per period, the work of the slowest rank.

    Args:
        block: Of as many rows as a rank has stages.
        lanes: Of a placement with one weight copy.
        durations: Per stage.
    """
    assert lanes.num_copies == 1
    num_ranks = len(lanes.of_rank)
    num_rows = lanes.num_stages // num_ranks
    work = zip(durations.forward, durations.backward_input, durations.backward_weight, strict=True)
    of_stage = [sum(parts) for parts in work]
    period = max(sum(of_stage[stage] for stage in own) for own in lanes.of_rank)
    slot = period / (3 * num_rows)
    took = (durations.forward, durations.backward_input)
    offsets = ([0.0] * lanes.num_stages, [0.0] * lanes.num_stages)
    kind, lane, time = F, 0, 0.0
    while lane >= 0:
        offsets[kind][lane] = time
        target, direction = next_of(lanes, kind, lane)
        crosses = target >= 0 and lanes.rank[target] != lanes.rank[lane]
        hop = took[kind][lane] + (durations.latency if crosses else 0.0)
        row = lane // num_ranks
        if direction != kind:
            hop += block.turn * slot
        elif target // num_ranks == row:
            hop = max(hop, slot * block.hops[row if kind == F else 2 * num_rows - 1 - row])
        kind, lane, time = direction, target, time + hop
    forward, backward = (
        tuple(
            tuple(offset + index * period for index in range(size))
            for offset, size in zip(offsets[kind], lanes.size, strict=True)
        )
        for kind in (F, I)
    )
    return Guide(forward, backward)
