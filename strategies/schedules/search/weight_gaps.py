"""Puts weight gradients into the time in which a rank waits: a list scheduler for W alone.

Only the optimizer waits for a W, so it may run at any time after its I. Everything else keeps
its order on each rank, which is why no choice made here can deadlock: a rank that cannot go on has
run all its Ws, and then stands where the program with each W right behind its I stands too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from strategies.analysis.memory import Sizes, held_changes, peak_held
from strategies.ir.graph import DURATION_ROWS, Graph
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import KINDS, Kind
from strategies.ir.program import Program
from strategies.schedules.schedule import Durations
from strategies.simulator.engine import order_times

# A gap is filled if its W ends at most this share of its duration too late.
_OVERHANGS = (0.0, 0.5, 1.0)


def fill_bubbles_with_w(program: Program, durations: Durations) -> Program:
    """Moves Ws into idle time; all else keeps its order on each rank.

    Never slower than the given program. Each rank holds at most what the fullest rank of the given
    program holds in (stage, microbatch) pairs; more than it held itself only where that is faster.
    Memory must suffice if each W directly follows its I.
    """
    assert not program.lowered
    best, least = program, makespan(program, durations)
    tolerance = 1e-9 * least
    peaks = [peak_held(program, rank, _pairs(program)) for rank in range(len(program.ranks))]
    for limits in (peaks, [max(peaks)] * len(peaks)):
        for overhang in _OVERHANGS:
            filler = _Filler(program, durations, limits, overhang)
            rows, ended = filler.run()
            if ended < least - tolerance:
                best, least = program.with_ranks(rows), ended
    return best


def _pairs(program: Program) -> Sizes:
    """However much of a pair is held: each counts as one."""
    ones = (1,) * program.placement.num_stages
    return Sizes.whole(ones, ones)


class _Filler:
    """One run of the list scheduler: all ranks' clocks and what each has still to do."""

    def __init__(
        self,
        program: Program,
        durations: Durations,
        limits: Sequence[float],
        overhang: float,
    ) -> None:
        graph = program.graph
        self._graph = graph
        self._limits = limits
        self._overhang = overhang
        self._duration = [duration(item, durations) for item in graph.nodes]
        # Sums of durations round; what is this close is there.
        self._tolerance = 1e-9 * max(self._duration, default=0.0)
        self._arrivals = [
            _arrivals(graph, node, durations.latency) for node in range(len(graph.nodes))
        ]
        spans = list(pairwise(graph.offsets))
        self._fixed = [
            deque(node for node in range(*span) if graph.nodes[node].kind is not Kind.W)
            for span in spans
        ]
        self._weights = {
            graph.needs[node][0]: node
            for node, item in enumerate(graph.nodes)
            if item.kind is Kind.W
        }
        self._pending: list[deque[int]] = [deque() for _ in spans]
        self._held = [0.0] * len(spans)
        sizes = _pairs(program)
        held = [each for r in range(len(spans)) for each in held_changes(program, r, sizes)]
        self._takes = [taken for _, taken, _ in held]
        self._frees = [freed for _, _, freed in held]
        self._free = [0.0] * len(spans)
        self._end: dict[int, float] = {}
        self._rows: list[list[Instruction]] = [[] for _ in spans]
        self._waiting: dict[int, list[int]] = {}
        self._wakes: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(spans))]

    def run(self) -> tuple[tuple[tuple[Instruction, ...], ...], float]:
        """The new lists and when the last instruction ends."""
        while self._wakes:
            now = self._wakes[0][0]
            woken = set()
            while self._wakes and self._wakes[0][0] <= now:
                woken.add(heappop(self._wakes)[1])
            # First everything whose turn it is, so that all that is known now is known to those
            # that look for a gap.
            idle = [
                rank
                for rank in sorted(woken)
                if self._free[rank] <= now and not self._advance(rank, now)
            ]
            for rank in idle:
                self._fill(rank, now)
        assert not any(self._fixed) and not any(self._pending)
        return tuple(map(tuple, self._rows)), max(self._free)

    def _advance(self, rank: int, now: float) -> bool:
        """Starts the rank's next instruction if that can start."""
        if not self._fixed[rank]:
            return False
        node = self._fixed[rank][0]
        if not self._fits(rank, node) or self._ready(node) > now + self._tolerance:
            return False
        self._fixed[rank].popleft()
        self._start(rank, node, max(now, self._ready(node)))
        return True

    def _fill(self, rank: int, now: float) -> None:
        """Starts a W, or arranges to be woken when the next instruction can start."""
        ready = float("inf")
        if self._fixed[rank] and self._fits(rank, self._fixed[rank][0]):
            ready = self._ready(self._fixed[rank][0])
        if self._pending[rank]:
            weight = self._pending[rank][0]
            inside = (1.0 - self._overhang) * self._duration[weight]
            if now + inside <= ready + self._tolerance:
                self._pending[rank].popleft()
                self._start(rank, weight, now)
                return
        if ready < float("inf"):
            heappush(self._wakes, (ready, rank))
        elif self._fixed[rank]:
            missing = [n for n, _ in self._arrivals[self._fixed[rank][0]] if n not in self._end]
            self._waiting.setdefault(missing[0], []).append(rank)

    def _fits(self, rank: int, node: int) -> bool:
        return self._held[rank] + self._takes[node] <= self._limits[rank]

    def _ready(self, node: int) -> float:
        """When all that ``node`` needs is there, as far as that has started."""
        unknown = float("inf")
        return max(
            (self._end.get(need, unknown) + hop for need, hop in self._arrivals[node]),
            default=0.0,
        )

    def _start(self, rank: int, node: int, now: float) -> None:
        end = self._free[rank] = self._end[node] = now + self._duration[node]
        self._rows[rank].append(self._graph.nodes[node])
        # The rank looks again when this ends; what it frees counts from then on.
        self._held[rank] += self._takes[node] - self._frees[node]
        if node in self._weights:
            self._pending[rank].append(self._weights[node])
        heappush(self._wakes, (end, rank))
        for other in self._waiting.pop(node, ()):
            heappush(self._wakes, (now, other))


# ------------------------------------------------------------------------------------------- clock
# When the instructions of a program without messages and updates end: what generators compare
# programs by.


def makespan(program: Program, durations: Durations) -> float:
    return max(times_of(program, durations)[1], default=0.0)


def times_of(program: Program, durations: Durations) -> tuple[list[float], list[float]]:
    """Start and end of every node."""
    took = [
        sum(getattr(durations, work)[stage] for work in KINDS[kind].work)
        for kind in DURATION_ROWS
        for stage in range(program.placement.num_stages)
    ]
    took += [took[first] + took[second] for first, second in program.flat.fused]
    return order_times(program, took, durations.latency)


def duration(item: Instruction, durations: Durations) -> float:
    """How long an F B I W R or fused pair occupies its rank; R takes as long as F."""
    works = [(work, part.stage) for part in item.parts for work in KINDS[part.kind].work]
    return float(sum(getattr(durations, work)[stage] for work, stage in works))


def _arrivals(graph: Graph, node: int, latency: float) -> list[tuple[int, float]]:
    """(node that must have ended, time until that is known here)."""
    here = graph.rank[node]
    return [(need, 0.0 if graph.rank[need] == here else latency) for need in graph.needs[node]]
