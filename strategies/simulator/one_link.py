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
from dataclasses import dataclass, field
from typing import Literal

from strategies.costs.table import CostTable
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
