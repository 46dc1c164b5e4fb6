"""Orders messages for backends where a send waits for its receive and holds both ranks.

Every linear extension of compute and messages is safe (``send_recv.py``); they differ in time. A
message right behind its producer makes a busy receiver hold up the sender, one right before its use
makes the receiver wait for a sender that computes. So the extension is chosen by simulated arrival
times. One walk keeps all ranks' clocks and takes, again and again, the event that can start first;
a message goes before a compute that could start earlier by less than ``patience`` if its receiver
uses it within the next ``ahead`` instructions. A few such walks and producer-time order are
simulated, the fastest is taken: the result is never slower in the simulation, and as safe.
"""

from __future__ import annotations

from collections import defaultdict

from strategies.costs.table import CostTable
from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.ir.program import Program
from strategies.lowering.send_recv import Message, end_times, messages, place_messages
from strategies.simulator.engine import replay

# Patience in mean durations of an instruction, and how many instructions ahead.
_WALKS = tuple((patience, ahead) for patience in (0.0, 0.3, 0.6, 1.1) for ahead in (1, 2, 4))


def order_messages(program: Program, table: CostTable) -> Program:
    """The fastest lowering found for a table whose sends wait for their receives."""
    end = end_times(program, table)
    best = place_messages(program, end, lambda message: end[message.producer])
    shortest = _makespan(best, table)
    tried = set()
    for patience, ahead in _WALKS:
        places, when = _Walk(program, table, patience, ahead).run()
        if tuple(when.values()) in tried:
            continue
        tried.add(tuple(when.values()))
        candidate = place_messages(program, places, when.__getitem__)
        makespan = _makespan(candidate, table)
        if makespan < shortest * (1 - 1e-9):
            best, shortest = candidate, makespan
    return best


def _makespan(program: Program, table: CostTable) -> float:
    return max(replay(program, table)[1], default=0.0)


class _Walk:
    """All ranks' clocks, and the events that may come next."""

    def __init__(self, program: Program, table: CostTable, patience: float, ahead: int) -> None:
        graph = program.graph
        self._graph = graph
        self._table = table
        self._rows: list[list[int]] = [[] for _ in program.ranks]
        for node, item in enumerate(graph.nodes):
            if item.kind in MICROBATCH_KINDS:
                self._rows[graph.rank[node]].append(node)
        self._turn = {node: turn for row in self._rows for turn, node in enumerate(row)}
        durations = [table.of(graph.nodes[node]) for node in self._turn]
        self._patience = patience * sum(durations) / max(1, len(durations))
        self._ahead = ahead
        self._next = [0] * len(self._rows)
        self._free = [0.0] * len(self._rows)
        self._made: dict[int, float] = {}  # compute node -> end
        self._outgoing: dict[int, list[Message]] = defaultdict(list)
        self._missing: dict[int, int] = defaultdict(int)  # node -> messages not arrived
        self._hop = {
            frozenset((b.source, b.target)): hop
            for b, hop in zip(program.boundaries, table.hops, strict=True)
        }
        for message in messages(program):
            self._outgoing[message.producer].append(message)
            self._missing[message.consumer] += 1
        self._pending: list[Message] = []

    def run(self) -> tuple[list[float], dict[Message, float]]:
        """Place of every node and of every message in one order."""
        count = 0
        places = [-1.0] * len(self._graph.nodes)
        when: dict[Message, float] = {}
        while any(turn < len(row) for turn, row in zip(self._next, self._rows, strict=True)):
            rank, start = min(self._ready(), key=lambda entry: entry[1], default=(-1, 0.0))
            message, at = self._urgent(rank, start)
            count += 1
            if message is not None:
                self._pending.remove(message)
                self._missing[message.consumer] -= 1
                ended = at + self._hop[frozenset((message.source, message.target))]
                for node in (message.producer, message.consumer):
                    self._free[self._graph.rank[node]] = ended
                when[message] = count
                continue
            node = self._rows[rank][self._next[rank]]
            self._next[rank] += 1
            self._free[rank] = start + self._table.of(self._graph.nodes[node])
            self._made[node] = self._free[rank]
            self._pending += self._outgoing[node]
            places[node] = count
        return _filled(places, self._graph.rank), when

    def _ready(self) -> list[tuple[int, float]]:
        """(rank, start) of computes that need nothing more."""
        found = []
        for rank, row in enumerate(self._rows):
            if self._next[rank] < len(row):
                node = row[self._next[rank]]
                if not self._missing[node] and all(
                    need in self._made for need in self._graph.needs[node] if need in self._turn
                ):
                    found.append((rank, self._free[rank]))
        return found

    def _urgent(self, rank: int, start: float) -> tuple[Message | None, float]:
        """The message to take before that compute, if any, and its start."""
        best: Message | None = None
        best_at = 0.0
        graph, limit = self._graph, start if rank >= 0 else float("inf")
        for message in self._pending:
            source, target = graph.rank[message.producer], graph.rank[message.consumer]
            at = max(self._free[source], self._free[target], self._made[message.producer])
            distance = self._turn[message.consumer] - self._next[target]
            slack = self._patience if distance < self._ahead and rank in (source, target) else 0.0
            if at <= limit + slack and (best is None or at < best_at):
                best, best_at = message, at
        return best, best_at


def _filled(places: list[float], rank: tuple[int, ...]) -> list[float]:
    """REDUCE and STEP stand where the list before them has got to."""
    last: dict[int, float] = {}
    for node, place in enumerate(places):
        if place < 0:
            places[node] = last.get(rank[node], 0.0)
        last[rank[node]] = places[node]
    return places
