"""Replays a program whose ranks share cores, or whose transfers share interfaces, or both.

How long something takes then depends on what else begins before it ends, so events are handled in
the order of time, and between two of them everything moves at a constant rate. All else is as in
``engine``.

Cores (processor sharing): while k computations run on c cores, each proceeds at the speed
min(1, c / k). All of them have then done the same amount of work since any moment at which they all
ran, so ends are kept on one clock of work, which advances at that speed. Messages and reductions
need no core.

Interfaces (``one_link``): one carries a second of transfer per second out and as much in, at the
same time. A message uses its sender's way out and its receiver's way in; a reduction or gather uses
both ports of its rank, as a ring over replicas does (all replicas do the same at the same time, so
one of them stands for all). Rates are max-min fair, as many TCP streams come to share a wire:
no transfer can have more without taking it from one that has no more. Messages of one ordered pair
of ranks follow each other, a rank's channel takes one reduction at a time.

Steps that follow each other without a barrier are replayed together, because a rank's next step
shares with the others' last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from strategies.costs.table import CostTable
from strategies.errors import CostError
from strategies.ir.graph import Channel, Compute, Message
from strategies.ir.program import Program

# Less is left of a transfer than rounding leaves of a sum of durations, relative to the time.
_ROUNDING = 1e-12

Item = Compute | Channel | Message
Spans = tuple[list[float], list[float]]
_Port = tuple[Literal["out", "in"], int]


def run_events(
    program: Program,
    items: Sequence[Item],
    table: CostTable,
    durations: Sequence[float],
    *,
    cores: float | None,
    steps: int,
) -> list[Spans]:
    """Start and end of every node of the program's graph, per step.

    Args:
        program: Lowered.
        items: What takes time, in an order in which every rank's and every channel's are in turn;
            a message that is an item of its own holds both its ranks.
        table: What messages and reductions take, and whether they share an interface.
        durations: What computations take on a core of their own, as the program's walk counts.
        cores: How many there are; a share of a core where other programs run beside this one; None
            for one per rank.
        steps: Iterations without a barrier between them.

    Raises:
        CostError: There is no core.
    """
    if cores is not None and not cores > 0:
        raise CostError(f"hardware.cores={cores:g}: at least one is needed. Try hardware.cores=1.")
    return _Replay(program, items, table, durations, cores, steps).run()


@dataclass(slots=True, eq=False)
class _Flow:
    """A transfer under way on shared interfaces: an item's place, or the first one of a message."""

    place: int
    message: Message | None
    ports: tuple[_Port, _Port]
    left: float  # seconds at full rate
    rate: float = 0.0


class _Replay:
    """One replay. A node of step n has the number n * num_nodes + node."""

    def __init__(
        self,
        program: Program,
        items: Sequence[Item],
        table: CostTable,
        durations: Sequence[float],
        cores: float | None,
        steps: int,
    ) -> None:
        self._table = table
        self._durations = durations
        self._cores = cores
        self._num_ranks = len(program.ranks)
        self._size = program.flat.num_nodes
        self._steps = steps
        total = self._size * steps
        self._start = [0.0] * total
        self._end = [0.0] * total
        self._missing: dict[int, int] = {}  # how much an item still waits for
        self._waiting: dict[int, list[int]] = {}  # node -> items that wait for its end
        self._released: dict[int, list[int]] = {}  # computation -> reductions inside it
        self._links: dict[int, float] = {}  # when each is free, where it is no shared interface
        self._queues: dict[int, deque[_Flow]] = {}  # what each has to carry, where it is one
        self._flows: list[_Flow] = []
        self._now = 0.0
        self._work = 0.0
        self._running = 0
        self._number = count()  # keeps equal times in the order in which they were foreseen
        # (clock, tie-break, node, whether it is a reduction that gets ready)
        self._by_work: list[tuple[float, int, int, bool]] = []
        self._by_time: list[tuple[float, int, int, bool]] = []
        self._ready: deque[int] = deque()
        self._items = {
            (item.send if isinstance(item, Message) else item.node) + step * self._size: item
            for step in range(steps)
            for item in items
        }
        self._connect()

    def _connect(self) -> None:
        """What every item waits for: its needs, and the item before it on its rank or channel."""
        last_on_rank: dict[int, int] = {}
        last_on_channel: dict[int, int] = {}
        for place, item in self._items.items():
            first = place - place % self._size
            awaited: set[int] = set()
            if isinstance(item, Message):
                ranks = divmod(item.link, self._num_ranks)
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
                    # A GATHER goes out when its rank comes to it, a REDUCE with its gradients.
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
        while self._ready or self._by_work or self._by_time or self._flows:
            while self._ready:
                self._begin(self._ready.popleft())
            self._advance()
        size = self._size
        bounds = [(step * size, (step + 1) * size) for step in range(self._steps)]
        return [(self._start[low:high], self._end[low:high]) for low, high in bounds]

    def _advance(self) -> None:
        now, never = self._now, float("inf")
        speed = 1.0
        if self._cores is not None and self._running:
            speed = min(1.0, self._cores / self._running)
        at_time = self._by_time[0][0] if self._by_time else never
        at_work = now + (self._by_work[0][0] - self._work) / speed if self._by_work else never
        later = min(at_time, at_work)
        if self._flows:
            _share(self._flows)
            later = min(later, *(now + flow.left / flow.rate for flow in self._flows))
            for flow in self._flows:
                flow.left -= (later - now) * flow.rate
        works = at_work == later < at_time
        if works:
            self._work = self._by_work[0][0]
        elif self._running:
            self._work += (later - now) * speed
        self._now = later
        self._land()
        if at_time == later:
            _, _, node, releases = heappop(self._by_time)
        elif works:
            _, _, node, releases = heappop(self._by_work)
        else:
            return
        if releases:
            self._one_less(node)
        else:
            self._ended(node)

    def _begin(self, place: int) -> None:
        item, now = self._items[place], self._now
        self._start[place] = now
        if isinstance(item, Compute):
            self._compute(place, self._durations[item.duration])
        elif isinstance(item, Channel):
            took = self._table.on_channel(item.stage, item.bucket)
            if self._table.one_link:
                self._flows.append(
                    _Flow(place, None, (("out", item.rank), ("in", item.rank)), took)
                )
            else:
                self._at(now + took, place)
        elif self._table.one_link:
            self._transfer(place - item.send, item)
        else:
            took = self._table.occupancy[item.boundary] + self._table.latency[item.boundary]
            self._carried(place - item.send, item, now, now + took)

    def _compute(self, place: int, took: float) -> None:
        inside = self._released.get(place, ())
        self._running += 1
        if self._cores is None:
            ended = self._now + took
            self._at(ended, place)
            for reduction in inside:
                share = self._fraction(reduction) * (ended - self._now)
                self._at(self._now + share, reduction, releases=True)
        else:
            self._at_work(took, place)
            for reduction in inside:
                self._at_work(self._fraction(reduction) * took, reduction, releases=True)

    def _fraction(self, place: int) -> float:
        item = self._items[place]
        assert isinstance(item, Channel)
        return item.fraction

    def _ended(self, node: int) -> None:
        self._end[node] = self._now
        for place in self._waiting.get(node, ()):
            self._one_less(place)
        item = self._items.get(node)
        if isinstance(item, Compute):
            self._running -= 1
            for message in item.messages:
                self._send(node - item.node, message)

    def _send(self, first: int, message: Message) -> None:
        """A buffered message gets its turn on its link."""
        if self._table.one_link:
            self._transfer(first, message)
            return
        leaves = max(self._now, self._links.get(message.link, 0.0))
        passed = leaves + self._table.occupancy[message.boundary]
        self._links[message.link] = passed
        self._carried(first, message, leaves, passed + self._table.latency[message.boundary])

    def _carried(self, first: int, message: Message, leaves: float, arrives: float) -> None:
        for node in (first + message.send, first + message.recv):
            self._start[node] = leaves
            self._at(arrives, node)

    def _transfer(self, first: int, message: Message) -> None:
        source, target = divmod(message.link, self._num_ranks)
        took = self._table.occupancy[message.boundary]
        queue = self._queues.setdefault(message.link, deque())
        queue.append(_Flow(first, message, (("out", source), ("in", target)), took))
        if len(queue) == 1:
            self._leave(queue[0])

    def _leave(self, flow: _Flow) -> None:
        assert flow.message is not None
        for node in (flow.message.send, flow.message.recv):
            self._start[flow.place + node] = self._now
        self._flows.append(flow)

    def _land(self) -> None:
        """Ends the transfers of which nothing is left."""
        now = self._now
        landed = [flow for flow in self._flows if flow.left <= _ROUNDING * max(now, 1e-3)]
        for flow in landed:
            self._flows.remove(flow)
            if flow.message is None:
                self._ended(flow.place)
                continue
            arrives = now + self._table.latency[flow.message.boundary]
            left = self._start[flow.place + flow.message.send]
            self._carried(flow.place, flow.message, left, arrives)
            queue = self._queues[flow.message.link]
            queue.popleft()
            if queue:
                self._leave(queue[0])

    def _one_less(self, place: int) -> None:
        self._missing[place] -= 1
        if not self._missing[place]:
            self._ready.append(place)

    def _at(self, time: float, node: int, *, releases: bool = False) -> None:
        heappush(self._by_time, (time, next(self._number), node, releases))

    def _at_work(self, took: float, node: int, *, releases: bool = False) -> None:
        heappush(self._by_work, (self._work + took, next(self._number), node, releases))


def _share(flows: list[_Flow]) -> None:
    """Max-min fair rates: the fullest port divides what it has left, then the next one."""
    left: dict[_Port, float] = {port: 1.0 for flow in flows for port in flow.ports}
    waiting = list(flows)
    while waiting:
        users: dict[_Port, int] = {}
        for flow in waiting:
            for port in flow.ports:
                users[port] = users.get(port, 0) + 1
        rate, port = min((left[port] / count, port) for port, count in users.items())
        for flow in [flow for flow in waiting if port in flow.ports]:
            flow.rate = rate
            waiting.remove(flow)
            for used in flow.ports:
                left[used] -= rate
