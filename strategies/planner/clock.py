"""How long one step of a walked order takes: the simulator's model, without its timeline.

The same rules as ``strategies.simulator.engine`` with buffered messages: lists in order, a message
leaves when its value is there, keeps its link and arrives a latency later, each rank has one
collective channel. Buckets of one stage take equally long and get ready evenly, so the end of the
last one has a closed form. A test holds both to the same times on every schedule.
"""

from __future__ import annotations

from typing import NamedTuple

from strategies.costs.table import CostTable
from strategies.planner.structure import Structure


class StepTime(NamedTuple):
    """Of one simulated step, in the table's time unit."""

    makespan: float
    period: float


def step_time(structure: Structure, table: CostTable, *, overlap: bool) -> StepTime:
    """Makespan and period of one step.

    Args:
        structure: The order.
        table: For as many stages; its ``reduce`` has one figure per bucket, all of a stage equal.
        overlap: Whether reductions start inside the stage's last backward.
    """
    ranks = range(structure.placement.num_ranks)
    ready, channel = _gathers(structure, table)
    start, end, free = _walk(structure, table, ready)
    begins, ends = [], []
    for rank in ranks:
        begin = start[structure.first_of_rank[rank]]
        gathers = any(table.gather) and any(table.gather[s] for s in structure.stages_by_end[rank])
        begins.append(0.0 if gathers else begin)
        now, busy = free[rank], channel[rank]
        reduced = {}
        for stage in structure.stages_by_end[rank]:
            node = structure.last_of_stage[stage]
            buckets = table.reduce[stage] if table.reduce else ()
            count = len(buckets)
            if not count:
                reduced[stage] = end[node]
                continue
            each = buckets[0]
            if overlap:
                # Bucket k gets ready (k + 1) / count into the backward; what waits for a bucket is
                # linear in k, so that the first or the last one decides.
                once = (end[node] - start[node]) / count
                busy = max(busy, start[node] + once) + count * each
                busy = max(busy, end[node] + each)
            else:
                busy = max(busy, free[rank]) + count * each
            reduced[stage] = busy
        for stage in structure.stages_by_end[rank]:
            now = max(now, reduced[stage]) + table.step[stage]
        ends.append(max(now, busy))
    makespan = max(ends) - min(begins)
    period = max(last - first for first, last in zip(begins, ends, strict=True))
    return StepTime(makespan, period)


def _gathers(structure: Structure, table: CostTable) -> tuple[dict[int, float], list[float]]:
    """When the weights of each stage are there, by the node that waits, and the channels."""
    ready: dict[int, float] = {}
    channel = [0.0] * structure.placement.num_ranks
    if any(table.gather):
        for rank, stages in enumerate(structure.stages_by_start):
            for stage in stages:
                if table.gather[stage]:
                    channel[rank] += table.gather[stage]
                    ready[structure.first_of_stage[stage]] = channel[rank]
    return ready, channel


def _walk(
    structure: Structure, table: CostTable, ready: dict[int, float]
) -> tuple[list[float], list[float], list[float]]:
    """Start and end per node, and when each rank has ended its list."""
    durations = (
        *table.forward,
        *table.backward,
        *table.backward_input,
        *table.backward_weight,
        *table.recompute,
    )
    latency, occupancy = table.latency, table.occupancy
    num_ranks = structure.placement.num_ranks
    count = len(structure.moves)
    start, end, there = [0.0] * count, [0.0] * count, [0.0] * count
    free, links = [0.0] * num_ranks, [0.0] * (num_ranks * num_ranks)
    for node, rank, duration, need, link, boundary in structure.moves:
        now = free[rank]
        if need >= 0 and there[need] > now:
            now = there[need]
        if ready and ready.get(node, 0.0) > now:
            now = ready[node]
        start[node] = now
        now += durations[duration]
        end[node] = free[rank] = now
        if link >= 0:
            if links[link] > now:
                now = links[link]
            now += occupancy[boundary]
            links[link] = now
            now += latency[boundary]
        there[node] = now
    return start, end, free
