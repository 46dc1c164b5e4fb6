"""Searches the paces of all ranks for the fastest order under a limit on full activations.

Regular paces come first: the same for all ranks, or one more pair in flight per rank to the front,
running ahead in bursts or evenly, with 1F1B's own pace where there is room for all it holds. Then
ranks change their pace at random, and what is not slower stays. Every rank of a run makes its
program by itself, so the search is bounded by a count, and its random numbers are always the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import ceil
from random import Random

from strategies.passes.recompute.capped_walk import Order, Pace, Work, capped_order

Paces = tuple[Pace, ...]

# Instructions that a search may order in all: well under a second's worth.
_BUDGET = 120_000
_LEAST = 8
_SEEDS = 6
_HIGHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


def best_orders(work: Work, *, goal: float, share: float, wanted: int) -> list[Order]:
    """The fastest orders found, the best first; at least one.

    Args:
        work: What is to be ordered.
        goal: No order is faster; the search ends when it finds one of that makespan.
        share: Of the budget.
        wanted: How many at most.
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
        highs = {high for high in _HIGHS if high < self.most} | {self.most}
        self.highs = sorted(highs)
        self.weights = (0, 1, 2) if work.split else (0,)

    def run(self) -> list[Paces]:
        """Paces by makespan, the shortest first."""
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
        return Pace(min(low, high - 1), high, self.work.room[rank], ahead, weights)

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
