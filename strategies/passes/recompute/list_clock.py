"""When the instructions of lists run, updated instruction by instruction while a pass moves them.

The simulator's model for programs without messages and updates: lists in order, a value arrives
``latency + occupancy`` after it is made. A move changes few times, so only what follows from it is
computed again: 9 ms for a move there and back in the middle of 32 ranks x 64 microbatches, 60 for
all lists (benchmarks/micro.py); a search makes thousands. What moves give is held
to ``compute_times``, which gives the first times, by tests.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise

from strategies.costs.table import CostTable
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS
from strategies.ir.program import Program
from strategies.simulator.engine import compute_times

# Times that differ by less, in shares of the longest instruction, are equal: sums round.
_SAME = 1e-9


class ListClock:
    """Lists of instructions and their times; the one mutable thing of a search.

    Attributes:
        rows: Per rank, numbers of instructions in the order in which they run.
        items: The instructions by number.
        start: When each begins.
        took: What each takes.
        arrivals: Per instruction, (what it needs, how long after that one's end it is there).
        tolerance: Times closer than this are equal.
        updates: How many times an instruction's time has been computed again.
    """

    def __init__(self, program: Program, table: CostTable) -> None:
        graph = program.graph
        self.items = graph.nodes
        self.rows = [list(range(*span)) for span in pairwise(graph.offsets)]
        self.took = [table.of(item) for item in graph.nodes]
        self.tolerance = _SAME * max(self.took, default=0.0)
        self.updates = 0
        self._rank = graph.rank
        self._place = [node - graph.offsets[graph.rank[node]] for node in range(len(graph.nodes))]
        self.arrivals = _arrivals(program, table)
        self._users: list[list[int]] = [[] for _ in graph.nodes]
        for node, needs in enumerate(graph.needs):
            for need in needs:
                self._users[need].append(node)
        self._backward = [
            any(part.kind in BACKWARD_KINDS for part in item.parts) for item in graph.nodes
        ]
        self.start, _ = compute_times(program, self.took, self.arrivals)
        self._backward_starts = sum(
            start for start, is_backward in zip(self.start, self._backward, strict=True)
            if is_backward
        )  # fmt: skip

    @property
    def makespan(self) -> float:
        return max((self.end(row[-1]) for row in self.rows if row), default=0.0)

    @property
    def cost(self) -> tuple[float, float]:
        """Makespan, then the sum of all backwards' starts: what a search lowers."""
        return self.makespan, self._backward_starts

    def end(self, node: int) -> float:
        return self.start[node] + self.took[node]

    def arrival(self, node: int) -> float:
        """When all that an instruction needs from others is there."""
        return max((self.end(need) + hop for need, hop in self.arrivals[node]), default=0.0)

    def free(self, node: int) -> float:
        """When its rank has ended what stands before an instruction."""
        place = self._place[node]
        return self.end(self.rows[self._rank[node]][place - 1]) if place else 0.0

    def place(self, node: int) -> int:
        return self._place[node]

    def hoist(self, node: int, place: int) -> dict[int, float] | None:
        """Moves an instruction to a smaller index in its list and updates all times.

        What ``put_back`` needs to undo it; None, with nothing changed, if the lists cannot run in
        that order.
        """
        row, old = self.rows[self._rank[node]], self._place[node]
        assert place < old
        self._shift(node, place)
        seeds = {node, row[place + 1], row[old]} | ({row[old + 1]} if old + 1 < len(row) else set())
        changed = self._update(seeds)
        if changed is None:
            self._shift(node, old)
        return changed

    def put_back(self, node: int, place: int, changed: dict[int, float]) -> None:
        """Undoes ``hoist``: the instruction's place before, and what that returned."""
        self._shift(node, place)
        for other, start in changed.items():
            self._set(other, start)

    def lists(self) -> tuple[tuple[Instruction, ...], ...]:
        return tuple(tuple(self.items[node] for node in row) for row in self.rows)

    def _shift(self, node: int, place: int) -> None:
        row, old = self.rows[self._rank[node]], self._place[node]
        row.insert(place, row.pop(old))
        for index in range(min(place, old), max(place, old) + 1):
            self._place[row[index]] = index

    def _update(self, seeds: set[int]) -> dict[int, float] | None:
        """Times of all that follows; what they were before."""
        # The innermost loop of a search, with ``_set`` written out.
        start, took, rank, rows, place = self.start, self.took, self._rank, self.rows, self._place
        arrivals, users, backward = self.arrivals, self._users, self._backward
        tolerance, sum_of_starts, updates = self.tolerance, self._backward_starts, self.updates
        waiting = [(start[node], node) for node in seeds]
        heapify(waiting)
        queued = set(seeds)
        before: dict[int, float] = {}
        left = 8 * len(start)  # Far more than any order that can run takes.
        while waiting:
            left -= 1
            if not left:
                self._backward_starts, self.updates = sum_of_starts, updates
                for node, time in before.items():
                    self._set(node, time)
                return None
            _, node = heappop(waiting)
            queued.discard(node)
            updates += 1
            row, index, time = rows[rank[node]], place[node], 0.0
            if index:
                previous = row[index - 1]
                time = start[previous] + took[previous]
            for need, hop in arrivals[node]:
                there = start[need] + took[need] + hop
                if there > time:
                    time = there
            moved = time - start[node]
            if -tolerance <= moved <= tolerance:
                continue
            before.setdefault(node, start[node])
            if backward[node]:
                sum_of_starts += moved
            start[node] = time
            index += 1
            if index < len(row) and (other := row[index]) not in queued:
                queued.add(other)
                heappush(waiting, (start[other], other))
            for other in users[node]:
                if other not in queued:
                    queued.add(other)
                    heappush(waiting, (start[other], other))
        self._backward_starts, self.updates = sum_of_starts, updates
        return before

    def _set(self, node: int, time: float) -> None:
        if self._backward[node]:
            self._backward_starts += time - self.start[node]
        self.start[node] = time


def list_makespan(program: Program, table: CostTable) -> float:
    """When the last rank ends, for lists that nothing moves."""
    took = [table.of(item) for item in program.graph.nodes]
    return max(compute_times(program, took, _arrivals(program, table))[1], default=0.0)


def _arrivals(program: Program, table: CostTable) -> list[list[tuple[int, float]]]:
    """Per node, what it needs and how long after that one's end it is there."""
    graph = program.graph
    rank, nodes = graph.rank, graph.nodes
    hops: dict[tuple[int, int], float] = {}
    for boundary, took in zip(program.boundaries, table.hops, strict=True):
        ends = (boundary.source, boundary.target)
        hops[ends] = hops[ends[::-1]] = took

    def hop(need: int, node: int) -> float:
        """Of a message between two instructions' stages; an edge arrives with its message."""
        return max(
            hops.get((one.stage, other.stage), 0.0)
            for one in nodes[need].parts
            for other in nodes[node].parts
        )

    return [
        [(need, 0.0 if rank[need] == here else hop(need, node)) for need in needs]
        for node, (here, needs) in enumerate(zip(rank, graph.needs, strict=True))
    ]
