"""Replays a program whose messages and reductions leave each rank through one interface.

The other engine gives every message its own link and every rank a collective channel of its own,
so its times follow from one walk. Here whatever is under way shares the interfaces, so how long a
transfer takes depends on what else begins before it ends: events are handled in the order of time,
and between two events every transfer moves at a constant rate.

Model: an interface carries one second of transfer per second out and as much in, at the same time.
A message uses its sender's way out and its receiver's way in; a reduction or gather uses both ways
of its rank, as a ring over replicas does (all replicas do the same at the same time, so one of them
stands for all). Rates are max-min fair, as many TCP streams come to share a wire: nobody can have
more without taking it from one who has no more. All else is as in ``engine``: messages of one
ordered pair of ranks follow each other, a rank's channel takes one reduction at a time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from strategies.costs.table import CostTable
from strategies.errors import CostError
from strategies.ir.program import Program
from strategies.ir.walk import Channel, Compute, Message

# Less is left of a transfer than rounding leaves of a sum of durations, relative to the time.
_ROUNDING = 1e-12

_Way = tuple[Literal["out", "in"], int]
_Transfer = Message | Channel


@dataclass
class _Flow:
    """A transfer under way."""

    what: _Transfer
    ways: tuple[_Way, _Way]
    left: float  # seconds at full rate
    rate: float = 0.0


@dataclass
class _Rank:
    """What one rank has still to do, and whether it is free."""

    computes: deque[Compute] = field(default_factory=deque)
    channel: deque[tuple[Channel, int]] = field(default_factory=deque)  # and computes before it
    computed: int = 0
    free: bool = False
    channel_free: bool = False


class OneLink:
    """One step; ``start`` and ``end`` are per node, the rest is when it leaves things free."""

    def __init__(
        self,
        program: Program,
        table: CostTable,
        durations: list[float],
        *,
        ranks: tuple[float, ...],
        channels: tuple[float, ...],
        links: tuple[float, ...],
    ) -> None:
        """Runs the step.

        Args:
            program: Lowered.
            table: Its costs.
            durations: The flat rows of ``engine``.
            ranks: When each rank is free.
            channels: When its channel is.
            links: When the link of each ordered pair of ranks is (source * P + target).
        """
        walk = program.walk
        self._table, self._durations = table, durations
        self._count = len(program.ranks)
        self.start = [0.0] * walk.num_nodes
        self.end = [0.0] * walk.num_nodes
        self.ranks, self.channels, self.links = list(ranks), list(channels), list(links)
        self._done = [False] * walk.num_nodes
        self._released: set[int] = set()
        self._ranks = [_Rank() for _ in program.ranks]
        self._inside: dict[int, list[Channel]] = {}
        for step in walk.steps:
            rank = self._ranks[step.rank]
            if isinstance(step, Compute):
                rank.computes.append(step)
            else:
                rank.channel.append((step, len(rank.computes)))
                if step.released_by >= 0:
                    self._inside.setdefault(step.released_by, []).append(step)
        self._queues: list[deque[Message]] = [deque() for _ in links]
        self._link_free = [False] * len(links)
        self._flows: list[_Flow] = []
        self._events: list[tuple[float, int, str, object]] = []
        self._number = 0
        for index, at in enumerate(ranks):
            self._at(at, "rank", index)
        for index, at in enumerate(channels):
            self._at(at, "channel", index)
        for index, at in enumerate(links):
            self._at(at, "link", index)
        self._run()

    def _at(self, time: float, name: str, about: object) -> None:
        # The number keeps equal times in the order in which they were foreseen.
        heapq.heappush(self._events, (time, self._number, name, about))
        self._number += 1

    def _run(self) -> None:
        now = 0.0
        while self._events or self._flows:
            ends = [now + flow.left / flow.rate for flow in self._flows]
            later = min(ends, default=self._events[0][0] if self._events else now)
            if self._events and self._events[0][0] < later:
                later = self._events[0][0]
            for flow in self._flows:
                flow.left -= (later - now) * flow.rate
            now = later
            self._land(now)
            while self._events and self._events[0][0] <= now:
                _, _, name, about = heapq.heappop(self._events)
                self._handle(now, name, about)
            self._begin(now)

    def _handle(self, now: float, name: str, about: object) -> None:
        if name == "rank":
            assert isinstance(about, int)
            self._ranks[about].free = True
        elif name == "channel":
            assert isinstance(about, int)
            self._ranks[about].channel_free = True
        elif name == "link":
            assert isinstance(about, int)
            self._link_free[about] = True
        elif name == "computed":
            assert isinstance(about, Compute)
            self._done[about.node] = True
            self._ranks[about.rank].free = True
            self._ranks[about.rank].computed += 1
            for message in about.messages:
                self._queues[message.link].append(message)
        elif name == "released":
            assert isinstance(about, int)
            self._released.add(about)
        else:
            assert isinstance(about, Message)
            self._done[about.send] = self._done[about.recv] = True

    def _land(self, now: float) -> None:
        """Ends the transfers of which nothing is left."""
        landed = [flow for flow in self._flows if flow.left <= _ROUNDING * max(now, 1e-3)]
        for flow in landed:
            self._flows.remove(flow)
            what = flow.what
            if isinstance(what, Channel):
                self._done[what.node] = True
                self.end[what.node] = self.channels[what.rank] = now
                self._ranks[what.rank].channel_free = True
            else:
                arrived = now + self._table.latency[what.boundary]
                self.end[what.send] = self.end[what.recv] = arrived
                self.links[what.link] = now
                self._link_free[what.link] = True
                self._at(arrived, "arrived", what)

    def _begin(self, now: float) -> None:
        """Starts whatever can start; a transfer of nothing ends at once and may let others go."""
        for index, rank in enumerate(self._ranks):
            if rank.free and rank.computes and self._ready(rank.computes[0].needs):
                self._compute(now, rank, rank.computes.popleft(), index)
            if rank.channel_free and rank.channel and self._can_transfer(rank):
                step, _ = rank.channel.popleft()
                rank.channel_free = False
                self.start[step.node] = now
                amount = self._table.on_channel(step.stage, step.bucket)
                self._flows.append(_Flow(step, (("out", index), ("in", index)), amount))
        for link, queue in enumerate(self._queues):
            if queue and self._link_free[link]:
                message = queue.popleft()
                self._link_free[link] = False
                self.start[message.send] = self.start[message.recv] = now
                source, target = divmod(link, self._count)
                amount = self._table.occupancy[message.boundary]
                self._flows.append(_Flow(message, (("out", source), ("in", target)), amount))
        _share(self._flows)

    def _compute(self, now: float, rank: _Rank, step: Compute, index: int) -> None:
        rank.free = False
        ended = now + self._durations[step.duration]
        self.start[step.node] = now
        self.end[step.node] = self.ranks[index] = ended
        self._at(ended, "computed", step)
        for bucket in self._inside.get(step.node, ()):
            self._at(now + bucket.fraction * (ended - now), "released", bucket.node)

    def _can_transfer(self, rank: _Rank) -> bool:
        step, before = rank.channel[0]
        if step.released_by >= 0:
            return step.node in self._released
        # A GATHER goes out when its rank comes to it, a REDUCE when its gradients are there.
        if step.bucket < 0 and rank.computed < before:
            return False
        return self._ready(step.needs)

    def _ready(self, needs: tuple[int, ...]) -> bool:
        return all(self._done[need] for need in needs)


def _share(flows: list[_Flow]) -> None:
    """Max-min fair rates: the fullest way divides what it has left, then the next one."""
    left: dict[_Way, float] = {way: 1.0 for flow in flows for way in flow.ways}
    waiting = list(flows)
    while waiting:
        users: dict[_Way, int] = {}
        for flow in waiting:
            for way in flow.ways:
                users[way] = users.get(way, 0) + 1
        rate, way = min((left[way] / count, way) for way, count in users.items())
        for flow in [flow for flow in waiting if way in flow.ways]:
            flow.rate = rate
            waiting.remove(flow)
            for used in flow.ways:
                left[used] -= rate


# ------------------------------------------------------------------------------------ shared cores
#
# Replays a program on fewer cores than ranks: computations that run at once share them.
#
# Processor sharing: while k computations run on c cores, each proceeds at the speed min(1, c / k).
# All of them have then done the same amount of work since any moment at which they all ran, so ends
# are kept on one clock of work, which advances at that speed; messages and reductions, which need
# no core, are kept on the clock of time. Steps that follow each other without a barrier are
# replayed together, because a rank's next step shares cores with the others' last one.
#
# Otherwise the model is that of ``engine``.


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
