"""LB1: how fast any order of the same instructions could be on the same placement and costs.

Every instruction has a head (longest path of data dependencies before it) and a tail (longest path
after it). On each rank the preemptive one-machine relaxation, Jackson's schedule, gives a bound in
O(n log n); the largest over the ranks counts. Recomputation, reductions and optimizer steps are
left out, which keeps the bound valid for orders with less of them. For equal stages it is
m(F+B) + (p-1)((F+B)/v + 2c), unsplit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strategies.costs.table import CostTable
from strategies.ir.kinds import ESSENTIAL_KINDS, MESSAGE_KINDS, MICROBATCH_KINDS, Kind
from strategies.ir.program import Program


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound of the makespan.

    Attributes:
        value: In the table's time unit.
        name: Which bound binds, and where: ``LB1 rank 3``.
    """

    value: float
    name: str

    @property
    def rank(self) -> int:
        return int(self.name.rpartition(" ")[2])


def lower_bound(program: Program, table: CostTable) -> Bound:
    """The largest one-machine bound over all ranks; of equal ones the lowest rank."""
    jobs = _jobs(program, table)
    values = [_one_machine(rank_jobs) for rank_jobs in jobs]
    rank = max(range(len(values)), key=lambda r: (values[r], -r))
    return Bound(values[rank], f"LB1 rank {rank}")


def _jobs(program: Program, table: CostTable) -> list[list[tuple[float, float, float]]]:
    """Per rank: (head, duration, tail) of every compute instruction of a microbatch."""
    graph = program.graph
    hop = {
        frozenset((b.source, b.target)): hop
        for b, hop in zip(program.boundaries, table.hops, strict=True)
    }
    duration = [0.0] * len(graph.nodes)
    for node, item in enumerate(graph.nodes):
        if item.kind in ESSENTIAL_KINDS:
            duration[node] = table.of(item)
        elif item.kind is Kind.RECV:
            assert item.peer is not None
            duration[node] = hop[frozenset((item.stage, item.peer))]
    head = [0.0] * len(graph.nodes)
    for node in graph.order:
        for need in graph.needs[node]:
            head[node] = max(head[node], head[need] + duration[need])
    tail = [0.0] * len(graph.nodes)
    for node in reversed(graph.order):
        if graph.nodes[node].kind not in MICROBATCH_KINDS | MESSAGE_KINDS:
            continue
        for need in graph.needs[node]:
            tail[need] = max(tail[need], tail[node] + duration[node])
    jobs: list[list[tuple[float, float, float]]] = [[] for _ in program.ranks]
    for node, item in enumerate(graph.nodes):
        if item.kind in ESSENTIAL_KINDS:
            jobs[graph.rank[node]].append((head[node], duration[node], tail[node]))
    return jobs


def _one_machine(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Jackson's preemptive schedule: of the jobs that are there, run the one with most tail.

    >>> _one_machine([(0.0, 2.0, 5.0), (1.0, 2.0, 0.0)])
    7.0
    >>> _one_machine([(0.0, 4.0, 0.0), (1.0, 1.0, 9.0)])
    11.0
    """
    waiting = sorted(jobs)
    ready: list[tuple[float, float]] = []  # (-tail, time left)
    now, best, index = 0.0, 0.0, 0
    while index < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[index][0])
        while index < len(waiting) and waiting[index][0] <= now:
            heapq.heappush(ready, (-waiting[index][2], waiting[index][1]))
            index += 1
        negative_tail, left = heapq.heappop(ready)
        until = waiting[index][0] if index < len(waiting) else float("inf")
        if now + left <= until:
            now += left
            best = max(best, now - negative_tail)
        else:
            heapq.heappush(ready, (negative_tail, left - (until - now)))
            now = until
    return best


# ------------------------------------------------------------------------------------ memory bound
# LB2: how fast any order could be that holds no more full activations than allowed.
#
# A pair (stage, microbatch) that keeps its activation occupies a place in memory at least as long
# as its gradient takes to come back, L; one that is recomputed only for R and its backward, but
# costs R. With room for K on a rank, and g what must run before the rank begins and after it has
# ended,
#
#     T >= g + work + sum of chosen R
#     T >= g + (sum of L over kept pairs + sum of R + B over recomputed ones) / K
#
# for every choice of pairs; the best choice bounds all orders. For one stage per rank, unsplit,
# this is max over s of min over n of max{g + m(F+B) + nR, g + ((m-n) L + n (R+B)) / K} with g =
# s(F+B) and L = (p-s)(F+B). With several stages per rank the choice is relaxed to shares of pairs.


class _Lane(NamedTuple):
    """One stage of one weight copy on a rank; times are lower bounds."""

    pairs: int
    head: float  # before its first forward
    tail: float  # after its last backward, or W
    work: float  # forwards and backwards of one microbatch
    kept: float  # from F to the end of B or W
    again: float  # R and what is left of the pair after it
    recompute: float


def memory_bound(program: Program, table: CostTable, caps: Sequence[float]) -> Bound:
    """The largest memory-time bound over all ranks; of equal ones the lowest rank.

    ``program`` trains, with or without messages and R; ``caps`` are per rank, in full-rank
    microbatches.
    """
    share = 1.0 / program.placement.stages_per_microbatch
    values = [
        _bound(lanes, cap / share) if lanes and cap > 0 else 0.0
        for lanes, cap in zip(_lanes(program, table), caps, strict=True)
    ]
    rank = max(range(len(values)), key=lambda r: (values[r], -r))
    return Bound(values[rank], f"LB2 rank {rank}")


def _bound(lanes: list[_Lane], room: float) -> float:
    """Of one rank; ``room`` in (stage, microbatch) pairs."""
    around = min(lane.head for lane in lanes) + min(lane.tail for lane in lanes)
    busy = around + sum(lane.pairs * lane.work for lane in lanes)
    held = around + sum(lane.pairs * lane.kept for lane in lanes) / room
    if len(lanes) == 1:
        lane = lanes[0]
        saved = (lane.kept - lane.again) / room
        return min(max(busy + n * lane.recompute, held - n * saved) for n in range(lane.pairs + 1))
    # Most memory-time per recomputation first; pairs in shares, which keeps the bound valid.
    best = max(busy, held)
    for lane in sorted(lanes, key=lambda x: _worth(x), reverse=True):
        saved = lane.pairs * (lane.kept - lane.again) / room
        cost = lane.pairs * lane.recompute
        if saved <= 0.0 or busy >= held:
            break
        part = min(1.0, (held - busy) / (saved + cost))
        busy, held = busy + part * cost, held - part * saved
        best = min(best, max(busy, held))
    return best


def _worth(lane: _Lane) -> float:
    saved = lane.kept - lane.again
    return saved / lane.recompute if lane.recompute > 0.0 else (float("inf") if saved > 0 else 0.0)


def _lanes(program: Program, table: CostTable) -> list[list[_Lane]]:
    """Per rank, its lanes with all that the bound needs to know."""
    placement = program.placement
    items = [part for row in program.ranks for item in row for part in item.parts]
    split = {part.stage for part in items if part.kind is Kind.I}
    paired = any(item.halves for row in program.ranks for item in row)
    scale = min(1.0, table.fused if paired else 1.0)
    stages = range(placement.num_stages)
    # What may run under the other half of a pair.
    away = [each.away if paired else 0.0 for each in table.exchange] or [0.0] * len(stages)
    forward = [scale * (table.forward[s] - away[s]) for s in stages]
    inputs = [
        scale * ((table.backward_input if s in split else table.backward)[s] - away[s])
        for s in stages
    ]
    weights = [scale * table.backward_weight[s] if s in split else 0.0 for s in stages]
    lanes: list[list[_Lane]] = [[] for _ in program.ranks]
    for copy, ranks in enumerate(placement.copies):
        pairs = len(range(copy, program.num_microbatches, placement.weight_copies))
        if not pairs:
            continue
        hops: dict[int, list[tuple[int, float]]] = {s: [] for s in stages}
        sources: dict[int, list[tuple[int, float]]] = {s: [] for s in stages}
        for boundary, took in zip(program.boundaries, table.hops, strict=True):
            hop = 0.0 if ranks[boundary.source] == ranks[boundary.target] else took
            hops[boundary.source].append((boundary.target, hop))
            sources[boundary.target].append((boundary.source, hop))
        head, after, there = [0.0] * len(stages), [0.0] * len(stages), [0.0] * len(stages)
        for stage in stages:
            for source, hop in sources[stage]:
                head[stage] = max(head[stage], head[source] + forward[source] + hop)
                after[stage] = max(after[stage], hop + inputs[source] + after[source])
        for stage in reversed(stages):
            there[stage] = forward[stage] + inputs[stage]
            there[stage] += max((2 * hop + there[t] for t, hop in hops[stage]), default=0.0)
        for stage in stages:
            recompute = table.recompute[stage]
            lanes[ranks[stage]].append(
                _Lane(
                    pairs=pairs,
                    head=head[stage],
                    tail=0.0 if stage in split else after[stage],
                    work=forward[stage] + inputs[stage] + weights[stage],
                    kept=there[stage] + weights[stage],
                    again=recompute + inputs[stage] + weights[stage],
                    recompute=recompute,
                )
            )
    return lanes
