"""Hanayo: w waves per microbatch over 2w stages per rank in zigzag, with one copy of the weights.

Liu et al., 2023, "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model
Training Efficiency", SC'23, https://arxiv.org/abs/2308.15762.

2 ranks, 4 microbatches, 2 stages per rank, B twice as long as F; a slot is half an F, and the
second half stands below the first (``-``: still running, ``.``: idle)::

    rank 0 | 0F0 0F1 0F2 3F0 3B0  -  3F1 3B1  -  0F3  .  0B0  -  3F2
    rank 1 |  .  1F0 2F0 1F1 2F1  .  2B0  -  1F2 1B0  -  2F2 2B1  -

    rank 0 | 3B2  -   .  0B1  -  3F3 3B3  -  0B2  -   .   .  0B3  -
    rank 1 | 1F3 1B1  -  2F3 2B2  -  1B2  -  2B3  -  1B3  -   .   .

w = ``schedule.stages_per_rank`` / 2. Warm-up and order are not read off the paper's figures but
searched for the run's own costs (``justify.py``), with P microbatches held on a rank at the most.
That memory alone keeps the bubble at (P-1)max(F,B)/w or above, where the paper's (P-1)(F+B)/2w has
none in mind: rank r is full r|B-F|/2w before its first gradient arrives. For equal stages and
M >= P the search gets there with one wave, and within 30 % of it with two (P=4, M=16: 3.5 over
3 F). Any M >= 1; where M < P, gaps are left between the waves.
"""

from __future__ import annotations

from strategies.errors import PlanError
from strategies.ir.program import Placement, Program, chain, v
from strategies.schedules.schedule import Durations, Rows, Schedule, Shape
from strategies.schedules.search.best_order import equal_durations
from strategies.schedules.search.justify import Chain, justified_rows
from strategies.schedules.search.weight_gaps import makespan


def order(shape: Shape) -> Rows:
    """The fastest order found on the zigzag with P microbatches' memory per rank."""
    placement = v(shape.pp, shape.stages_per_rank)
    equal = equal_durations(placement)
    durations = shape.durations or equal
    rows = _searched(placement, shape.num_microbatches, durations)
    if durations.equal:
        return rows
    # Regular orders stand up well to irregular costs, and the search does not always find them.
    links = chain(placement.num_stages)
    searched = Program("hanayo", placement, shape.num_microbatches, rows, links)
    regular = searched.with_ranks(_searched(placement, shape.num_microbatches, equal))
    return min(regular, searched, key=lambda program: makespan(program, durations)).ranks


def _searched(placement: Placement, num_microbatches: int, durations: Durations) -> Rows:
    halves = zip(durations.backward_input, durations.backward_weight, strict=True)
    way = Chain(
        rank_of=placement.copies[0],
        num_microbatches=num_microbatches,
        forward=durations.forward,
        backward=tuple(first + second for first, second in halves),
        latency=durations.latency,
        limit=placement.num_stages,
    )
    return justified_rows(way, target=_least_makespan(way))


def _least_makespan(way: Chain) -> float:
    """No order on this placement with this memory is faster."""
    stages = range(len(way.rank_of))
    hop = [
        way.latency if stage and way.rank_of[stage - 1] != way.rank_of[stage] else 0.0
        for stage in stages
    ]
    least = 0.0
    for rank in range(way.num_ranks):
        own = [stage for stage in stages if way.rank_of[stage] == rank]
        work = sum(way.forward[stage] + way.backward[stage] for stage in own)
        messages = sum(hop[: own[0] + 1])
        # Before the rank's first instruction can start, and after its last one can end.
        head = sum(way.forward[: own[0]]) + messages
        tail = sum(way.backward[: own[0]]) + messages
        # The first gradient arrives a while after the rank has filled its memory; at the end, in
        # mirrored time, it waits likewise where backwards are shorter than forwards.
        turn = sum(hop) + sum(hop[own[-1] + 1 :])
        filled = min(way.limit, len(own) * way.num_microbatches)
        waits = [
            turn
            + sum(there)
            + sum(back[own[-1] + 1 :])
            - before
            - filled * max(map(there.__getitem__, own))
            for there, back, before in (
                (way.forward, way.backward, head),
                (way.backward, way.forward, tail),
            )
        ]
        least = max(least, head + max(0.0, *waits) + way.num_microbatches * work + tail)
    return least


def _rule(shape: Shape) -> None:
    if shape.stages_per_rank % 2:
        raise PlanError(
            f"schedule.stages_per_rank={shape.stages_per_rank}: each wave of hanayo crosses a rank "
            "twice, so the number is even. Try schedule.stages_per_rank="
            f"{shape.stages_per_rank + 1}."
        )


HANAYO = Schedule(
    "hanayo",
    order,
    placement="v",
    stages_per_rank=2,
    virtual_stages=True,
    cost_aware=True,
    rule=_rule,
)
