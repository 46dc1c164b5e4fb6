"""A generator for unsplit schedules: list scheduling under a memory limit, improved by turning time.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from strategies.ir.instruction import backward, forward
from strategies.schedules.schedule import Rows

# What a cell of the chain is: a place 0 .. 2S-1 on a microbatch's way through all stages and back.
_Starts = list[list[float]]
_Urgency = Callable[[int, int], float]

# Microbatches enter this share of (F+B) apart in the timetable that a first pass aims at.
_PACES = (0.5, 0.75, 1.0, 1.5)
_TURNS = 24
# Instructions placed in all passes together; bounds the time for large programs to about a second.
_BUDGET = 250_000


@dataclass(frozen=True, slots=True)
class Chain:
    """Microbatches that all go through the same stages and back.

    Attributes:
        rank_of: Rank per stage.
        num_microbatches: M.
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
        """P."""
        return max(self.rank_of) + 1


def justified_rows(chain: Chain, *, target: float) -> Rows:
    """The fastest order found; deterministic.

    Args:
        chain: What is to be ordered.
        target: A makespan that ends the search.
    """
    ranks = tuple((*chain.rank_of, *reversed(chain.rank_of)))
    durations = (*chain.forward, *reversed(chain.backward))
    onward = _Pass(chain, ranks, durations)
    mirrored = _Pass(chain, ranks, tuple(reversed(durations)))
    passes_left = max(1, _BUDGET // (len(ranks) * chain.num_microbatches))
    best: _Starts = []
    least = float("inf")
    for pace in _PACES:
        starts = onward.run(_timetable(durations, pace * sum(durations) / chain.num_ranks))
        for _ in range(_TURNS):
            ended = onward.makespan(starts)
            if ended < least:
                best, least = starts, ended
            if least <= target * (1 + 1e-9) or passes_left <= 0:
                return _rows(chain, best)
            back = mirrored.run(_latest_end_first(starts, durations))
            starts = onward.run(_latest_end_first(back, tuple(reversed(durations))))
            passes_left -= 2
    return _rows(chain, best)


def _timetable(durations: Sequence[float], interval: float) -> _Urgency:
    """When a place would be reached if nobody ever waited."""
    reached = [sum(durations[:place]) for place in range(len(durations))]
    return lambda place, microbatch: microbatch * interval + reached[place]


def _latest_end_first(starts: _Starts, durations: Sequence[float]) -> _Urgency:
    """For a pass in the other direction: what ended last comes first."""
    last_place, last = len(durations) - 1, len(starts[0]) - 1
    return lambda place, microbatch: (
        -starts[last_place - place][last - microbatch] - durations[last_place - place]
    )


def _rows(chain: Chain, starts: _Starts) -> Rows:
    num_stages = len(chain.rank_of)
    cells = sorted(
        (start, place, microbatch)
        for place, row in enumerate(starts)
        for microbatch, start in enumerate(row)
    )
    rows: list[list[tuple[int, int]]] = [[] for _ in range(chain.num_ranks)]
    for _, place, microbatch in cells:
        stage = min(place, 2 * num_stages - 1 - place)
        rows[chain.rank_of[stage]].append((place, microbatch))
    return tuple(
        tuple(
            forward(place, microbatch)
            if place < num_stages
            else backward(2 * num_stages - 1 - place, microbatch)
            for place, microbatch in row
        )
        for row in rows
    )


class _Pass:
    """The list scheduler for one direction of time."""

    def __init__(self, chain: Chain, ranks: tuple[int, ...], durations: tuple[float, ...]) -> None:
        self._chain = chain
        self._ranks = ranks
        self._durations = durations
        self._hops = [
            chain.latency if here != there else 0.0
            for here, there in zip(ranks, ranks[1:], strict=False)
        ]
        self._stages = [chain.rank_of.count(rank) for rank in range(chain.num_ranks)]
        self._tolerance = 1e-9 * max(durations)

    def makespan(self, starts: _Starts) -> float:
        return max(start + self._durations[-1] for start in starts[-1])

    def run(self, urgency: _Urgency) -> _Starts:
        """Start per place and microbatch; of equally urgent instructions the older one."""
        chain, ranks, durations = self._chain, self._ranks, self._durations
        num_ranks, num_microbatches = chain.num_ranks, chain.num_microbatches
        half = len(ranks) // 2
        starts: _Starts = [[0.0] * num_microbatches for _ in ranks]
        self._own = [[0] * num_microbatches for _ in range(num_ranks)]
        self._entered = [[0] * num_microbatches for _ in range(num_ranks)]
        ready: list[set[tuple[float, int, int]]] = [set() for _ in range(num_ranks)]
        free = [0.0] * num_ranks
        # (time, place, microbatch): arrival of what a place needs; place -1 wakes a rank.
        events = [(0.0, 0, microbatch) for microbatch in range(num_microbatches)]
        while events:
            now = events[0][0]
            woken = set()
            while events and events[0][0] <= now + self._tolerance:
                _, place, number = heappop(events)
                if place < 0:
                    woken.add(number)
                    continue
                rank = ranks[place]
                ready[rank].add((urgency(place, number), number, place))
                woken.add(rank)
                if place > half:
                    continue
            for rank in sorted(woken):
                if free[rank] > now + self._tolerance:
                    continue
                self._release(rank)
                best = None
                for cell in ready[rank]:
                    if (best is None or cell < best) and (
                        cell[2] >= half or self._fits(rank, cell[1])
                    ):
                        best = cell
                if best is None:
                    continue
                ready[rank].remove(best)
        return starts
