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

from strategies.costs.table import CostTable
from strategies.ir.instruction import MICROBATCH_KINDS, Kind
from strategies.ir.program import Program

# What any order computes; R is a choice.
_NEEDED = MICROBATCH_KINDS - {Kind.R}


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
        """Where it binds."""
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
        frozenset((b.source, b.target)): table.latency[i] + table.occupancy[i]
        for i, b in enumerate(program.boundaries)
    }
    duration = [0.0] * len(graph.nodes)
    for node, item in enumerate(graph.nodes):
        if item.kind in _NEEDED:
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
        if graph.nodes[node].kind not in MICROBATCH_KINDS | {Kind.SEND, Kind.RECV}:
            continue
        for need in graph.needs[node]:
            tail[need] = max(tail[need], tail[node] + duration[node])
    jobs: list[list[tuple[float, float, float]]] = [[] for _ in program.ranks]
    for node, item in enumerate(graph.nodes):
        if item.kind in _NEEDED:
            jobs[graph.rank[node]].append((head[node], duration[node], tail[node]))
    return jobs


def _one_machine(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Jackson's preemptive schedule: of the jobs that are there, run the one with most tail.

    >>> _one_machine([(0, 2, 5), (1, 2, 0)])
    7
    >>> _one_machine([(0, 4, 0), (1, 1, 9)])
    11
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
