"""Generates an order for given durations: a greedy walk through simulated time.

All ranks run at once. A rank that is free takes what its ``Priorities`` name next, the F or I of
least nominal time for which there is memory. If that has not arrived, the rank fills the time with
something else that is ready, W last, provided it does not delay that choice by too much. If a
forward is next but memory is full, a W is run to free some.

Memory never deadlocks: on every rank, the pairs (stage, microbatch) held by a stage and those below
it leave one free pair for each of the rank's higher stages. Suppose all ranks were stuck, and take
the blocked forward of the highest stage s. Any pair held on its rank belongs to a microbatch whose
next instruction is an I, which needs no memory, or a forward, which by the choice of s is one of
stage s at most; so all held pairs lie below s, but those leave room for s.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from operator import sub
from typing import NamedTuple

from strategies.ir.program import Placement
from strategies.schedules.schedule import Durations, Rows
from strategies.schedules.search.lanes import (
    F,
    I,
    Lanes,
    StepRows,
    W,
    first_arrivals,
    lanes_of,
    routes,
)

_NEVER = float("inf")
NominalTimes = tuple[tuple[float, ...], ...]  # per lane and index


@dataclass(frozen=True, slots=True)
class Priorities:
    """In which order ranks would like to run their F and I: by nominal time, in any unit.

    Attributes:
        forward: Of every F, per lane and index; ascending on each lane.
        backward: Of every I.
    """

    forward: NominalTimes
    backward: NominalTimes


@dataclass(frozen=True, slots=True)
class Policy:
    """How a rank decides.

    Attributes:
        spare: A forward fills idle time only while more than this many pairs are free.
        patience: An instruction may fill idle time if no more than this share of it delays the
            guide's choice, as far as the arrival of that is known.
    """

    guide: Priorities
    spare: int = 0
    patience: float = 0.0


class Walked(NamedTuple):
    """An order and its times, in the unit of the durations.

    Attributes:
        makespan: First start to last end.
        period: Max over ranks of (end - start).
    """

    steps: StepRows
    makespan: float
    period: float


def generate(
    placement: Placement,
    num_microbatches: int,
    durations: Durations,
    *,
    caps: tuple[int, ...],
    policy: Policy,
) -> Rows:
    """An order of F, I and W for these durations that keeps the caps.

    ``caps`` are per rank, (stage, microbatch) pairs that it may hold from F to W, at least one for
    each of its stages; ``policy`` decides about speed only.
    """
    lanes = lanes_of(placement, num_microbatches)
    return lanes.rows(walk(lanes, durations, caps=caps, policy=policy).steps)


def walk(lanes: Lanes, durations: Durations, *, caps: tuple[int, ...], policy: Policy) -> Walked:
    """Like ``generate``, without instructions; nothing could start earlier than it does here."""
    assert all(cap >= len(own) for cap, own in zip(caps, lanes.of_rank, strict=True))
    return _Walk(lanes, durations, caps, policy).run()


class _Walk:
    """The state of all ranks at one moment."""

    def __init__(
        self, lanes: Lanes, durations: Durations, caps: tuple[int, ...], policy: Policy
    ) -> None:
        self.lanes = lanes
        self.caps = caps
        self.policy = policy
        self.nominal = (policy.guide.forward, policy.guide.backward)
        self.latency = durations.latency
        rows = (durations.forward, durations.backward_input, durations.backward_weight)
        self.took = [[row[stage] for stage in lanes.stage] for row in rows]
        self.tolerance = 1e-9 * max(max(row) for row in rows)
        self.arrival = first_arrivals(lanes, _NEVER)
        self.goes_to = routes(lanes)
        self.done = [[0] * len(lanes.rank) for _ in (F, I, W)]
        self.held = [0] * len(caps)
        self.from_last = [own[::-1] for own in lanes.of_rank]
        self.began = [0.0] * len(caps)
        self.busy_until = [0.0] * len(caps)
        self.rows: StepRows = [[] for _ in caps]
        # Set when every rank waits for what another cannot run: guides may ask for the impossible.
        self.stalled = False

    def run(self) -> Walked:
        left = 3 * sum(self.lanes.size)
        events = [(0.0, rank) for rank in range(len(self.caps))]
        stalled_with = -1
        now = 0.0
        while left:
            if not events:
                assert left != stalled_with, "no memory for any forward"
                self.stalled, stalled_with = True, left
                events = [(max(now, busy), rank) for rank, busy in enumerate(self.busy_until)]
            now, rank = heappop(events)
            if now < self.busy_until[rank]:
                continue
            kind, lane, later = self.choose(rank, now)
            if kind >= 0:
                left -= 1
                self.start(events, kind, lane, now)
            elif later < _NEVER:
                heappush(events, (later, rank))
        spans = map(sub, self.busy_until, self.began)
        return Walked(self.rows, max(self.busy_until), max(spans))

    def choose(self, rank: int, now: float) -> tuple[int, int, float]:
        """(kind, lane, -) of what to run now, or (-1, -1, when to ask again)."""
        done_f, done_i, done_w = self.done
        nominal_f, nominal_i = self.nominal
        sizes, arrivals = self.lanes.size, self.arrival
        next_kind = next_lane = fill_kind = fill_lane = weight = -1
        next_time = fill_time = weight_time = blocked_time = next_arrival = _NEVER
        # What is left for a lane after all pairs below it, and one for each lane above.
        room = self.caps[rank] - self.held[rank]
        may_fill = self.stalled or room > self.policy.spare
        free = _NEVER
        for lane in self.from_last[rank]:
            index = done_f[lane]
            if room < free:
                free = room
            room += index - done_w[lane] - 1
            if index < sizes[lane]:
                time = nominal_f[lane][index]
                if free > 0:
                    arrival = arrivals[F][lane][index]
                    if time < next_time:
                        next_time, next_arrival, next_kind, next_lane = time, arrival, F, lane
                    if arrival <= now and may_fill and time < fill_time:
                        fill_time, fill_kind, fill_lane = time, F, lane
                elif time < blocked_time:
                    blocked_time = time
            index = done_i[lane]
            if index < done_f[lane]:
                time, arrival = nominal_i[lane][index], arrivals[I][lane][index]
                if time < next_time:
                    next_time, next_arrival, next_kind, next_lane = time, arrival, I, lane
                if arrival <= now and time < fill_time:
                    fill_time, fill_kind, fill_lane = time, I, lane
            index = done_w[lane]
            if index < done_i[lane] and nominal_i[lane][index] < weight_time:
                weight_time, weight = nominal_i[lane][index], lane
        if weight >= 0 and blocked_time < next_time:
            return W, weight, now
        if next_arrival <= now:
            return next_kind, next_lane, now
        if fill_kind >= 0 and self.fits(fill_kind, fill_lane, now, next_arrival):
            return fill_kind, fill_lane, now
        if weight >= 0 and self.fits(W, weight, now, next_arrival):
            return W, weight, now
        return -1, -1, next_arrival

    def fits(self, kind: int, lane: int, now: float, until: float) -> bool:
        share = 1.0 - self.policy.patience
        return now + share * self.took[kind][lane] <= until + self.tolerance

    def start(self, events: list[tuple[float, int]], kind: int, lane: int, now: float) -> None:
        rank, index = self.lanes.rank[lane], self.done[kind][lane]
        end = now + self.took[kind][lane]
        if not self.rows[rank]:
            self.began[rank] = now
        self.rows[rank].append((kind, lane, index))
        self.done[kind][lane] += 1
        self.busy_until[rank] = end
        heappush(events, (end, rank))
        if kind == W:
            self.held[rank] -= 1
            return
        if kind == F:
            self.held[rank] += 1
        target, direction = self.goes_to[kind][lane]
        if target >= 0:
            there = self.lanes.rank[target]
            arrival = end if there == rank else end + self.latency
            self.arrival[direction][target][index] = arrival
            if there != rank:
                heappush(events, (arrival, there))
