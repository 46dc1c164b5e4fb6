"""Replays a program on fewer cores than ranks: computations that run at once share them.

Processor sharing: while k computations run on c cores, each proceeds at the speed min(1, c / k).
All of them have then done the same amount of work since any moment at which they all ran, so ends
are kept on one clock of work, which advances at that speed; messages and reductions, which need no
core, are kept on the clock of time. Steps that follow each other without a barrier are replayed
together, because a rank's next step shares cores with the others' last one.

Otherwise the model is that of ``engine``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from strategies.costs.table import CostTable
from strategies.errors import CostError
from strategies.ir.program import Program
from strategies.ir.walk import Channel, Compute, Message

Spans = tuple[list[float], list[float]]


def run_shared(
    program: Program, table: CostTable, durations: Sequence[float], *, cores: float, steps: int
) -> list[Spans]:
    """Start and end of every node of the program's graph, per step.

    Args:
        program: Lowered.
        table: What messages and reductions take.
        durations: What computations take on a core of their own, as the program's walk counts.
        cores: How many there are; a share of a core where other programs run beside this one.
        steps: Iterations without a barrier between them.

    Raises:
        CostError: There is no core, or messages and reductions share an interface.
    """
    if not cores > 0:
        raise CostError(f"hardware.cores={cores:g}: at least one is needed. Try hardware.cores=1.")
    if table.one_link:
        raise CostError(
            f"hardware.cores={cores:g} shares cores, and these costs share an interface between "
            "messages and reductions: one of the two is replayed. Try hardware.cores=null."
        )
    return _Replay(program, table, durations, cores, steps).run()


class _Replay:
    """One replay. A node of step n has the number n * num_nodes + node."""

    def __init__(
        self,
        program: Program,
        table: CostTable,
        durations: Sequence[float],
        cores: float,
        steps: int,
    ) -> None:
        self._table = table
        self._durations = durations
        self._cores = cores
        self._size = program.walk.num_nodes
        total = self._size * steps
        self._start = [0.0] * total
        self._end = [0.0] * total
        self._items: dict[int, Compute | Channel | Message] = {}
        self._missing: dict[int, int] = {}  # how much an item still waits for
        self._waiting: dict[int, list[int]] = {}  # node -> items that wait for its end
        self._released: dict[int, list[int]] = {}  # computation -> reductions inside it
        self._links: dict[int, float] = {}
        self._now = 0.0
        self._work = 0.0
        self._running = 0
        self._number = count()
        # (clock, tie-break, node, whether it is a reduction that gets ready)
        self._by_work: list[tuple[float, int, int, bool]] = []
        self._by_time: list[tuple[float, int, int]] = []
        self._ready: deque[int] = deque()
        self._steps = steps
        for step in range(steps):
            for place, item in _items(program, rendezvous=table.transport == "rendezvous"):
                self._items[place + step * self._size] = item
        self._connect(program)

    def _connect(self, program: Program) -> None:
        """What every item waits for: its needs, and the item before it on its rank or channel."""
        last_on_rank: dict[int, int] = {}
        last_on_channel: dict[int, int] = {}
        for place, item in self._items.items():
            first = place - place % self._size
            awaited: set[int] = set()
            if isinstance(item, Message):
                ranks = [program.graph.rank[item.send], program.graph.rank[item.recv]]
                awaited |= {last_on_rank[r] for r in ranks if r in last_on_rank}
                last_on_rank.update(dict.fromkeys(ranks, place))
            elif isinstance(item, Compute):
                awaited |= {first + need for need in item.needs}
                if item.rank in last_on_rank:
                    awaited.add(last_on_rank[item.rank])
                last_on_rank[item.rank] = place
            else:
                if item.rank in last_on_channel:
                    awaited.add(last_on_channel[item.rank])
                if item.released_by >= 0:
                    self._released.setdefault(first + item.released_by, []).append(place)
                else:
                    awaited |= {first + need for need in item.needs}
                    if item.bucket < 0 and item.rank in last_on_rank:
                        awaited.add(last_on_rank[item.rank])
                last_on_channel[item.rank] = place
            inside = isinstance(item, Channel) and item.released_by >= 0
            self._missing[place] = len(awaited) + inside
            for node in awaited:
                self._waiting.setdefault(node, []).append(place)
            if not self._missing[place]:
                self._ready.append(place)

    def run(self) -> list[Spans]:
        while self._ready or self._by_work or self._by_time:
            while self._ready:
                self._begin(self._ready.popleft())
            self._advance()
        size = self._size
        bounds = [(step * size, (step + 1) * size) for step in range(self._steps)]
        return [(self._start[low:high], self._end[low:high]) for low, high in bounds]

    def _advance(self) -> None:
        """To whatever ends next."""
        speed = min(1.0, self._cores / self._running) if self._running else 1.0
        at_work = float("inf")
        if self._by_work:
            at_work = self._now + (self._by_work[0][0] - self._work) / speed
        if self._by_time and self._by_time[0][0] <= at_work:
            at, _, node = heapq.heappop(self._by_time)
            if self._running:
                self._work += (at - self._now) * speed
            self._now = at
            self._ended(node)
        elif self._by_work:
            self._work, _, node, releases = heapq.heappop(self._by_work)
            self._now = at_work
            if releases:
                self._one_less(node)
            else:
                self._running -= 1
                self._computed(node)

    def _begin(self, place: int) -> None:
        item, now = self._items[place], self._now
        self._start[place] = now
        if isinstance(item, Compute):
            took = self._durations[item.duration]
            self._running += 1
            self._at_work(took, place)
            for reduction in self._released.get(place, ()):
                channel = self._items[reduction]
                assert isinstance(channel, Channel)
                self._at_work(channel.fraction * took, reduction, releases=True)
        elif isinstance(item, Channel):
            self._at(now + self._table.on_channel(item.stage, item.bucket), place)
        else:
            first = place - place % self._size
            took = self._table.occupancy[item.boundary] + self._table.latency[item.boundary]
            self._start[first + item.recv] = now
            self._at(now + took, first + item.send)
            self._at(now + took, first + item.recv)

    def _computed(self, place: int) -> None:
        """A computation has ended: its messages leave, unless they are items of their own."""
        self._ended(place)
        item = self._items[place]
        assert isinstance(item, Compute)
        if self._table.transport == "rendezvous":
            return
        first = place - place % self._size
        for message in item.messages:
            leaves = max(self._now, self._links.get(message.link, 0.0))
            passed = leaves + self._table.occupancy[message.boundary]
            self._links[message.link] = passed
            arrives = passed + self._table.latency[message.boundary]
            for node in (first + message.send, first + message.recv):
                self._start[node] = leaves
                self._at(arrives, node)

    def _ended(self, node: int) -> None:
        self._end[node] = self._now
        for place in self._waiting.get(node, ()):
            self._one_less(place)

    def _one_less(self, place: int) -> None:
        self._missing[place] -= 1
        if not self._missing[place]:
            self._ready.append(place)

    def _at(self, time: float, node: int) -> None:
        heapq.heappush(self._by_time, (time, next(self._number), node))

    def _at_work(self, took: float, node: int, *, releases: bool = False) -> None:
        heapq.heappush(self._by_work, (self._work + took, next(self._number), node, releases))


def _items(
    program: Program, *, rendezvous: bool
) -> Iterator[tuple[int, Compute | Channel | Message]]:
    """What takes time, in an order in which every rank's and every channel's items are in turn."""
    if not rendezvous:
        for step in program.walk.steps:
            yield step.node, step
        return
    steps = {step.node: step for step in program.walk.steps}
    messages = {
        message.send: message
        for step in program.walk.steps
        if isinstance(step, Compute)
        for message in step.messages
    }
    for node in program.graph.order:
        if node in messages:
            yield node, messages[node]
        elif node in steps:
            yield node, steps[node]
