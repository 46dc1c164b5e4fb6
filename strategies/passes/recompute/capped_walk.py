"""Generates an order, and what is recomputed in it, for a limit on full activations.

All ranks run at once through simulated time. A rank that is free runs, in this order: a backward
that is ready; an R whose gradient is there or will be when the R has ended; the forward that its
guide names next; a weight gradient. A forward keeps its activation if there is room, else its input
only. What distinguishes orders is how far a rank lets forwards run ahead (``Pace``).

Room never deadlocks. An R starts only when its gradient is on its way, so what it takes is given
back. On each lane (stage of a weight copy) backwards keep the order of forwards, and what forwards
keep leaves every pair that waits for its R a place: pairs behind it on its lane and pairs of lower
stages never fill the rank. So the highest stage that waits for room gets it: what fills its rank is
held by pairs before it or by stages above, which do not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import ceil
from random import Random
from typing import NamedTuple

from strategies.schedules.search.lanes import F, I, Lanes, StepRows, W, first_arrivals, routes

R = 3  # After F, I and W of ``lanes``; an I is the whole backward where none is split.

_NEVER = float("inf")


class Pace(NamedTuple):
    """How one rank takes turns.

    Attributes:
        low: Forwards begin to run ahead when no more than this many pairs per lane are in flight.
        high: They stop when this many are.
        keep: How many pairs forwards may keep at a time.
        ahead: 1 if forwards go before recomputation, 2 if before backwards, too.
        weights: 1 if weight gradients go before forwards, 2 if before all else.
    """

    low: int
    high: int
    keep: int
    ahead: int = 0
    weights: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be ordered.

    Attributes:
        lanes: Stages and microbatches on ranks.
        took: Durations of F, I (or B), W and R per lane.
        hop: Per lane, latency from it to the next higher lane of its weight copy, and back.
        turn: Per lane and index, when its forward should come among those of its rank.
        room: Per rank, full activations that it may hold, in (stage, microbatch) pairs.
        split: Whether W is an instruction of its own.
    """

    lanes: Lanes
    took: tuple[tuple[float, ...], ...]
    hop: tuple[float, ...]
    turn: tuple[tuple[float, ...], ...]
    room: tuple[int, ...]
    split: bool


class Order(NamedTuple):
    """A generated order."""

    makespan: float
    steps: StepRows  # Per rank, (kind, lane, index).


def capped_order(work: Work, paces: tuple[Pace, ...]) -> Order:
    """One order; ``paces`` are per rank."""
    return _Walk(work, paces).run()


class _Walk:
    """The state of all ranks at one moment."""

    def __init__(self, work: Work, paces: tuple[Pace, ...]) -> None:
        lanes = work.lanes
        self.work = work
        self.paces = paces
        self.of_rank = lanes.of_rank
        self.size = lanes.size
        count = len(lanes.rank)
        self.tolerance = 1e-9 * max(map(max, work.took))
        self.arrival = first_arrivals(lanes, _NEVER)
        self.goes_to = routes(lanes)
        # Whether the graph of a pair is there; before its F, False.
        self.graph = [[False] * size for size in lanes.size]
        self.done = [[0] * count for _ in (F, I, W, R)]
        self.next_again = [0] * count  # First index of a lane that may need an R.
        self.held = [0] * len(lanes.of_rank)
        self.kept = [0] * len(lanes.of_rank)
        self.in_lane = [0] * count
        self.by_forward = [[False] * size for size in lanes.size]
        self.filling = [True] * count
        self.busy_until = [0.0] * len(lanes.of_rank)
        self.rows: StepRows = [[] for _ in lanes.of_rank]

    def run(self) -> Order:
        backwards = 2 if self.work.split else 1
        left = (1 + backwards) * sum(self.size)
        events = [(0.0, rank) for rank in range(len(self.of_rank))]
        while left:
            assert events, "no room for anything"
            now, rank = heappop(events)
            if now < self.busy_until[rank]:
                continue
            kind, lane, later = self.choose(rank, now)
            if kind >= 0:
                left -= kind != R
                self.start(events, kind, lane, now)
            elif later < _NEVER:
                heappush(events, (later, rank))
        return Order(max(self.busy_until), self.rows)

    def choose(self, rank: int, now: float) -> tuple[int, int, float]:
        """(kind, lane, -) of what to run now, or (-1, -1, when to ask again)."""
        done_f, done_i, done_w, _ = self.done
        forward_at, gradient_at = self.arrival
        soon = now + self.tolerance
        own = self.of_rank[rank]
        later = _NEVER
        free = self.work.room[rank] - self.held[rank]
        again = wait_for_room = weight = backward = -1
        pace = self.paces[rank]
        for lane in reversed(own):
            index = done_i[lane]
            if index < done_f[lane]:
                arrival = gradient_at[lane][index]
                if self.graph[lane][index]:
                    if arrival > soon:
                        later = min(later, arrival)
                    elif backward < 0:
                        backward = lane
                if again < 0:
                    again = self.to_rebuild(lane, soon)
                    if again >= 0 and not free:
                        wait_for_room, again = lane, -1
            if self.work.split and done_w[lane] < done_i[lane]:
                weight = lane
        if weight >= 0 and pace.weights == 2:
            return W, weight, now
        if backward >= 0 and pace.ahead < 2:
            return I, backward, now
        if again >= 0 and not pace.ahead:
            return R, again, now
        if weight >= 0 and (wait_for_room >= 0 or pace.weights == 1):
            return W, weight, now
        best, best_turn = -1, _NEVER
        for lane in own:
            index = done_f[lane]
            if index == self.size[lane]:
                continue
            if forward_at[lane][index] > soon:
                later = min(later, forward_at[lane][index])
                continue
            flying = index - done_i[lane]
            if flying >= pace.high:
                self.filling[lane] = False
            elif flying <= pace.low:
                self.filling[lane] = True
            if self.filling[lane] and self.work.turn[lane][index] < best_turn:
                best, best_turn = lane, self.work.turn[lane][index]
        if best >= 0:
            return F, best, now
        if backward >= 0:
            return I, backward, now
        if again >= 0:
            return R, again, now
        if weight >= 0:
            return W, weight, now
        return -1, -1, later

    def to_rebuild(self, lane: int, soon: float) -> int:
        """The lane, if its next pair without graph should be rebuilt now; else -1."""
        index = max(self.next_again[lane], self.done[I][lane])
        last = self.done[F][lane]
        graph = self.graph[lane]
        while index < last and graph[index]:
            index += 1
        self.next_again[lane] = index
        if index == last:
            return -1
        ready = self.arrival[I][lane][index]
        return lane if ready <= soon + self.work.took[R][lane] else -1

    def may_keep(self, rank: int, lane: int) -> bool:
        """Whether the lane's next forward may take a place and nothing gets stuck."""
        room = self.work.room[rank]
        if self.held[rank] == room or self.kept[rank] >= self.paces[rank].keep:
            return False
        lower = 0
        for other in self.of_rank[rank]:
            here = self.in_lane[other] + (other == lane)
            last = self.done[F][other]
            self.to_rebuild(other, _NEVER)
            pending = self.next_again[other]
            behind = 0
            if pending < last:
                behind = sum(self.graph[other][pending:last]) + (other == lane)
            if lower + behind >= room and self.done[I][other] < self.size[other]:
                return False
            lower += here
        return True

    def start(self, events: list[tuple[float, int]], kind: int, lane: int, now: float) -> None:
        rank = self.work.lanes.rank[lane]
        split = self.work.split
        end = now + self.work.took[kind][lane]
        index = self.done[kind][lane]
        if kind == R:
            index = self.next_again[lane]
            self.graph[lane][index] = True
            self.held[rank] += 1
            self.in_lane[lane] += 1
        elif kind == F:
            if self.may_keep(rank, lane):
                self.graph[lane][index] = self.by_forward[lane][index] = True
                self.held[rank] += 1
                self.in_lane[lane] += 1
                self.kept[rank] += 1
        elif kind == (W if split else I):
            self.held[rank] -= 1
            self.in_lane[lane] -= 1
            self.kept[rank] -= self.by_forward[lane][index]
        self.rows[rank].append((kind, lane, index))
        self.done[kind][lane] += 1
        self.busy_until[rank] = end
        heappush(events, (end, rank))
        if kind in (W, R):
            return
        target, direction = self.goes_to[kind][lane]
        if target < 0:
            return
        there = self.work.lanes.rank[target]
        arrival = end
        if there != rank:
            arrival += self.work.hop[min(lane, target)]
        self.arrival[direction][target][index] = arrival
        if there != rank:
            heappush(events, (max(now, arrival - self.work.took[R][target]), there))
            heappush(events, (arrival, there))


# ------------------------------------------------------------------------------------- pace search
# Regular paces come first: the same for all ranks, or one more pair in flight per rank to the
# front, running ahead in bursts or evenly, with 1F1B's own pace where there is room for all it
# holds. Then ranks change their pace at random, and what is not slower stays. Every rank of a run
# makes its program by itself, so the search is bounded by a count, and its random numbers are
# always the same.

Paces = tuple[Pace, ...]

# Instructions that a search may order in all: well under a second's worth.
_BUDGET = 120_000
_LEAST = 8
_SEEDS = 6
_HIGHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


def best_orders(work: Work, *, goal: float, share: float, wanted: int) -> list[Order]:
    """The fastest orders found, the best first; at least one and at most ``wanted``.

    The search ends at an order of makespan ``goal``: none is faster. ``share`` is of the budget.
    """
    count = max(ceil(share * _LEAST), int(share * _BUDGET) // (3 * sum(work.lanes.size)))
    found = _Search(work, count, goal=goal).run()
    return [capped_order(work, paces) for paces in found[:wanted]]


class _Search:
    def __init__(self, work: Work, count: int, *, goal: float) -> None:
        self.work = work
        self.left = count
        self.goal = goal * (1 + 1e-9)
        self.seen: dict[Paces, float] = {}
        self.random = Random(0)
        self.most = max(work.lanes.size)
        self.highs = sorted({high for high in _HIGHS if high < self.most} | {self.most})
        self.weights = (0, 1, 2) if work.split else (0,)

    def run(self) -> list[Paces]:
        for paces in self.regular():
            if self.left <= 0:
                break
            self.makespan(paces)
        pool = self.ranked()[:_SEEDS]
        current, best = pool[0], self.seen[pool[0]]
        # Most changes give paces that have been seen, where ranks and microbatches are few.
        for _ in range(8 * max(0, self.left)):
            if self.left <= 0 or best <= self.goal:
                break
            if self.random.random() < 0.02:
                current = self.random.choice(pool)
            changed = self.changed(current)
            found = self.makespan(changed)
            if found <= self.seen[current] * (1 + 1e-9):
                current = changed
            best = min(best, found)
        return self.ranked()

    def makespan(self, paces: Paces) -> float:
        if paces not in self.seen:
            self.left -= 1
            self.seen[paces] = capped_order(self.work, paces).makespan
        return self.seen[paces]

    def ranked(self) -> list[Paces]:
        return sorted(self.seen, key=lambda paces: (self.seen[paces], paces))

    def regular(self) -> Iterator[Paces]:
        """The most promising first: bursts as long as there are ranks, then even paces."""
        ranks = range(len(self.work.room))
        across = self.depth(0) + 1
        far = [2 * across, self.most, across, across + across // 2, 3 * across, across // 2]
        most = self.weights[len(self.weights) // 2]
        tuned = []
        for high in far:
            tuned += [(high, 0, most, 0), (high, high - 1, most, 1)]
        rest = product(reversed(self.highs), (0, None), reversed(self.weights), (0, 1))
        tuned += [(h, h - 1 if low is None else low, w, a) for h, low, w, a in rest]
        for high, low, weights, ahead in tuned:
            flat = [self.pace(low, high, r, ahead, weights) for r in ranks]
            yield self.exact(flat, weights)
            yield tuple(flat)
            stair = [self.pace(low, high + self.depth(r), r, ahead, weights) for r in ranks]
            yield self.exact(stair, weights)
            yield tuple(stair)

    def exact(self, paces: Iterable[Pace], weights: int) -> Paces:
        """With 1F1B's pace on ranks that have room for it."""
        return tuple(
            self.pace(self.depth(rank), self.depth(rank) + 1, rank, 0, weights)
            if self.work.room[rank] > self.depth(rank)
            else pace
            for rank, pace in enumerate(paces)
        )

    def depth(self, rank: int) -> int:
        """Ranks behind this one, as its lowest lane sees it."""
        lanes = self.work.lanes
        own = lanes.of_rank[rank]
        return (lanes.num_stages - 1 - lanes.stage[own[0]]) // max(
            1, len(own) // lanes.num_copies
        ) if own else 0  # fmt: skip

    def pace(self, low: int, high: int, rank: int, ahead: int, weights: int) -> Pace:
        high = max(1, min(high, self.most))
        # A lane that has filled up goes on at ``low``, which below 0 is never.
        return Pace(max(0, min(low, high - 1)), high, self.work.room[rank], ahead, weights)

    def changed(self, paces: Paces) -> Paces:
        changed = list(paces)
        for _ in range(self.random.choice((1, 1, 2, 3))):
            rank = self.random.randrange(len(changed))
            changed[rank] = self.other(changed[rank], rank)
        return tuple(changed)

    def other(self, pace: Pace, rank: int) -> Pace:
        draw, choose, room = self.random.random(), self.random.choice, self.work.room[rank]
        if draw < 0.5:
            high = choose(self.highs)
            low = choose((0, high // 2, high - 1, max(0, high - 2)))
            keep = choose((room, room, max(0, room - 1), room // 2))
            return Pace(low, high, keep, choose((0, 0, 1, 2)), choose(self.weights))
        if draw < 0.65:
            high = max(1, min(self.most, pace.high + choose((-2, -1, 1, 2))))
            return pace._replace(high=high, low=min(pace.low, high - 1))
        if draw < 0.75:
            return pace._replace(low=max(0, min(pace.high - 1, pace.low + choose((-1, 1)))))
        if draw < 0.85:
            return pace._replace(ahead=choose((0, 1, 2)))
        if draw < 0.92:
            return pace._replace(weights=choose(self.weights))
        return pace._replace(keep=self.random.randint(0, room))
