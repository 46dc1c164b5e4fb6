"""Unsplit schedules by list scheduling under a memory limit, improved by turning time around.

A list scheduler gives each rank that falls idle the most urgent instruction that is ready. What is
urgent is learned: the schedule found is replayed backwards from its end, last things first, and the
result backwards again. That is forward-backward improvement of resource-constrained projects (Li
and Willis, 1992, https://doi.org/10.1016/0377-2217(92)90320-9; Valls, Ballestin and Quintanilla,
2005, https://doi.org/10.1016/j.ejor.2004.04.008, "justification"). A pipeline read backwards is
a pipeline again, with B for F and F for B, so one scheduler serves both directions.

Memory cannot deadlock: a rank takes a microbatch in only if every older one, once all before it are
gone, still finds room for all its stages here (the banker's rule, oldest first).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from strategies.ir.instruction import Instruction, backward, forward
from strategies.schedules.schedule import Rows

# Of (place, microbatch); places 0 .. 2S-1 are a microbatch's way through all stages and back. The
# smallest goes first.
_Urgency = Callable[[int, int], float]

# The first passes aim at timetables in which microbatches enter this far apart, as a share of what
# one of them takes on the slowest rank.
_PACES = (0.5, 1.0, 1.5, 8.0, 0.75, 2.0, 0.9, 1.25, 0.6, 0.4)
# Turns without a gain after which the next timetable is tried.
_PATIENCE = 5
# A rank waits for something more urgent that comes within this share of what it could start now.
_FORESIGHT = 0.5
# Instructions placed in all passes together: for large programs, the time of about half a second.
_BUDGET = 150_000


@dataclass(frozen=True, slots=True)
class Chain:
    """Microbatches that all go through the same stages and back.

    Attributes:
        forward: F per stage.
        backward: B per stage.
        latency: Of a message between ranks.
        limit: (stage, microbatch) pairs that a rank may hold, at least its number of stages.
    """

    rank_of: tuple[int, ...]
    num_microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    latency: float
    limit: int

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1


class _Found(NamedTuple):
    """A schedule: start per place and microbatch, and (place, microbatch) as they were issued."""

    starts: list[list[float]]
    issued: list[tuple[int, int]]


def justified_rows(chain: Chain, *, target: float) -> Rows:
    """The fastest order found; deterministic. A makespan of ``target`` ends the search."""
    ranks = tuple((*chain.rank_of, *reversed(chain.rank_of)))
    durations = (*chain.forward, *reversed(chain.backward))
    onward = _Pass(chain, ranks, durations)
    mirrored = _Pass(chain, ranks, tuple(reversed(durations)))
    slowest = max(
        sum(took for took, there in zip(durations, ranks, strict=True) if there == rank)
        for rank in range(chain.num_ranks)
    )
    budget = _BUDGET // (len(ranks) * chain.num_microbatches)
    best = onward.run(_timetable(durations, _PACES[0] * slowest))
    for pace in _PACES:
        found = onward.run(_timetable(durations, pace * slowest))
        here, since = float("inf"), 0
        while since < _PATIENCE:
            ended = onward.makespan(found)
            if ended < onward.makespan(best) * (1 - 1e-9):
                best = found
            since = 0 if ended < here * (1 - 1e-9) else since + 1
            here = min(here, ended)
            if budget <= 0 or onward.makespan(best) <= target * (1 + 1e-9):
                return _rows(chain, best)
            back = mirrored.run(_latest_end_first(found, durations))
            again = onward.run(_latest_end_first(back, tuple(reversed(durations))))
            budget -= 2
            if again.starts == found.starts:
                break
            found = again
    return _rows(chain, best)


def _timetable(durations: Sequence[float], interval: float) -> _Urgency:
    """When a place would be reached if nobody ever waited."""
    reached = [sum(durations[:place]) for place in range(len(durations))]
    return lambda place, microbatch: microbatch * interval + reached[place]


def _latest_end_first(found: _Found, durations: Sequence[float]) -> _Urgency:
    """For a pass in the other direction: what ended last comes first."""
    last_place, last = len(durations) - 1, len(found.starts[0]) - 1
    return lambda place, microbatch: (
        -found.starts[last_place - place][last - microbatch] - durations[last_place - place]
    )


def _rows(chain: Chain, found: _Found) -> Rows:
    num_stages = len(chain.rank_of)
    rows: list[list[Instruction]] = [[] for _ in range(chain.num_ranks)]
    for place, microbatch in found.issued:
        stage = min(place, 2 * num_stages - 1 - place)
        make = forward if place < num_stages else backward
        rows[chain.rank_of[stage]].append(make(stage, microbatch))
    return tuple(map(tuple, rows))


class _Pass:
    """The list scheduler for one direction of time."""

    def __init__(self, chain: Chain, ranks: tuple[int, ...], durations: tuple[float, ...]) -> None:
        self._chain = chain
        self._ranks = ranks
        self._durations = durations
        self._hops = [
            chain.latency if here != there else 0.0
            for here, there in zip(ranks, (*ranks[1:], ranks[-1]), strict=True)
        ]
        self._tolerance = 1e-9 * max(durations)

    def makespan(self, found: _Found) -> float:
        return max(found.starts[-1]) + self._durations[-1]

    def run(self, urgency: _Urgency) -> _Found:
        """Issues everything; of equally urgent instructions the older microbatch's."""
        num_microbatches, half = self._chain.num_microbatches, len(self._ranks) // 2
        found = _Found([[0.0] * num_microbatches for _ in self._ranks], [])
        memory = [_Memory(self._chain, rank) for rank in range(self._chain.num_ranks)]
        ready: list[list[tuple[float, int, int]]] = [[] for _ in memory]
        coming: list[dict[tuple[float, int, int], float]] = [{} for _ in memory]
        busy = [False] * len(memory)
        # (time, place, microbatch): an end where the place is negative (-1 - place), else an
        # arrival of what the place needs. Ends come first, so that their memory is free.
        events = [(0.0, 0, microbatch) for microbatch in range(num_microbatches)]
        while events:
            now = events[0][0]
            woken = set()
            while events and events[0][0] <= now + self._tolerance:
                time, place, microbatch = heappop(events)
                rank = self._ranks[place if place >= 0 else -1 - place]
                woken.add(rank)
                if place >= 0:
                    arrived = (urgency(place, microbatch), microbatch, place)
                    coming[rank].pop(arrived, None)
                    insort(ready[rank], arrived)
                    continue
                place = -1 - place
                busy[rank] = False
                if place >= half:
                    memory[rank].free(microbatch)
                if place + 1 < len(self._ranks):
                    heappush(events, (time + self._hops[place], place + 1, microbatch))
            for rank in sorted(woken):
                if busy[rank]:
                    continue
                fits = memory[rank].fits
                able = (cell for cell in ready[rank] if cell[2] >= half or fits(cell[1]))
                cell = next(able, None)
                if cell is None:
                    continue
                _, microbatch, place = cell
                soon = now + _FORESIGHT * self._durations[place] - self._tolerance
                if any(
                    later < cell and arrival < soon and (later[2] >= half or fits(later[1]))
                    for later, arrival in coming[rank].items()
                ):
                    continue
                ready[rank].remove(cell)
                if place < half:
                    memory[rank].take(microbatch)
                busy[rank] = True
                found.starts[place][microbatch] = now
                found.issued.append((place, microbatch))
                end = now + self._durations[place]
                heappush(events, (end, -1 - place, microbatch))
                if place + 1 < len(self._ranks):
                    after = (urgency(place + 1, microbatch), microbatch, place + 1)
                    coming[self._ranks[place + 1]][after] = end + self._hops[place]
        return found


class _Memory:
    """What one rank holds, per microbatch."""

    def __init__(self, chain: Chain, rank: int) -> None:
        self._limit = chain.limit
        self._stages = chain.rank_of.count(rank)
        self._own = [0] * chain.num_microbatches
        self._to_come = [self._stages] * chain.num_microbatches
        self._held = 0
        self._oldest = 0  # All before it are through with this rank.

    def fits(self, microbatch: int) -> bool:
        """Whether the microbatch may enter one more stage of this rank."""
        left = self._held + 1
        if left > self._limit:
            return False
        for older in range(self._oldest, microbatch):
            to_come = self._to_come[older]
            if to_come and left + to_come > self._limit:
                return False
            left -= self._own[older]
        return True

    def take(self, microbatch: int) -> None:
        """One more pair, from the start of its F on."""
        self._own[microbatch] += 1
        self._to_come[microbatch] -= 1
        self._held += 1

    def free(self, microbatch: int) -> None:
        """One pair less, at the end of its B."""
        self._own[microbatch] -= 1
        self._held -= 1
        own, to_come = self._own, self._to_come
        while self._oldest < len(own) and not (own[self._oldest] or to_come[self._oldest]):
            self._oldest += 1
