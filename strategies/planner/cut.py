"""Where a chain of units is cut: bottleneck first, then bytes, then evenness, within memory.

The smallest possible slowest stage comes from bisection: filling each stage as far as time and
memory allow gets furthest, because a shorter stage needs less of both. Among the cuts that keep to
it, dynamic programming takes the one that sends least, and of these the most even one. Exact for
one stage per rank. With more, what a rank takes in all is evened out by moving single units.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from strategies.errors import PlanError

SAME = 1e-9
"""Sums of the same figures in another order: closer is equal."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What the units of a stage may take of its rank's memory.

    Attributes:
        state: Bytes per unit of weights, gradients and optimizer.
        activation: Bytes per unit that one microbatch keeps.
        held: Per stage, how many microbatches keep that.
        limits: Bytes, per stage.
    """

    state: tuple[float, ...]
    activation: tuple[float, ...]
    held: tuple[float, ...]
    limits: tuple[float, ...]

    def sums(self, held: float) -> list[float]:
        """Bytes that the first units take, where so many microbatches are held."""
        each = (s + held * a for s, a in zip(self.state, self.activation, strict=True))
        return [0.0, *accumulate(each)]

    def holds(self, units: Sequence[int]) -> bool:
        taken = zip(self.taken(units), self.limits, strict=True)
        return all(much <= limit for much, limit in taken)

    def taken(self, units: Sequence[int]) -> list[float]:
        """Bytes that the units of each stage take."""
        edges = [0, *accumulate(units)]
        return [
            sum(self.state[low:high]) + held * sum(self.activation[low:high])
            for (low, high), held in zip(pairwise(edges), self.held, strict=True)
        ]


def cut_chain(
    times: Sequence[float],
    num_stages: int,
    *,
    sent: Sequence[float] | None = None,
    room: MemoryLimit | None = None,
    min_units: int = 1,
    balance_ratio: float = 0.0,
) -> tuple[int, ...] | None:
    """Units per stage; None if no cut keeps to the memory limit.

    Args:
        times: What each unit takes, > 0, in any unit.
        num_stages: 1 or more.
        sent: Bytes that a cut behind each unit sends; None for equally many everywhere.
        room: The memory limit; None for none.
        min_units: 0 allows empty stages.
        balance_ratio: Bytes come first as long as no stage takes more than that many times an
            equal share; 0 for the bottleneck first.

    >>> cut_chain([1, 1, 1, 1, 4], 2)
    (4, 1)
    """
    count = len(times)
    if count < num_stages * min_units:
        return None
    extents = _FeasibleRanges(times, num_stages, room, min_units)
    limit = extents.smallest_limit()
    if limit is None:
        return None
    sums = extents.sums
    limit = max(limit, balance_ratio * sums[-1] / num_stages * (1 + SAME))
    first, last = extents.possible_ends(limit)
    crossing = [0.0] * (count + 1) if sent is None else [0.0, *map(float, sent)]
    best: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    starts: list[dict[int, int]] = []
    for stage in range(num_stages):
        now: dict[int, tuple[float, float]] = {}
        chosen: dict[int, int] = {}
        for end in range(first[stage], last[stage] + 1):
            behind = crossing[end] if end < count and stage < num_stages - 1 else 0.0
            for start in range(end - min_units, extents.earliest(stage, end, limit) - 1, -1):
                before = best.get(start)
                if before is not None:
                    bytes_sent = before[0] + (behind if end > start else 0.0)
                    value = (bytes_sent, before[1] + (sums[end] - sums[start]) ** 2)
                    if end not in now or value <= now[end]:
                        now[end], chosen[end] = value, start
        starts.append(chosen)
        best = now
    edges = [count]
    for chosen in reversed(starts):
        edges.append(chosen[edges[-1]])
    return tuple(high - low for low, high in pairwise(reversed(edges)))


def balance_ranks(
    units: Sequence[int], times: Sequence[float], owner: Sequence[int]
) -> tuple[int, ...]:
    """Moves single units between neighbouring stages while the slowest rank gets faster.

    Starts from ``units`` per stage; a stage that has units keeps at least one. ``owner`` is the
    rank of each stage.
    """
    sums = [0.0, *accumulate(map(float, times))]
    edges = [0, *accumulate(units)]
    loads = [0.0] * (max(owner) + 1)
    for stage, (low, high) in enumerate(pairwise(edges)):
        loads[owner[stage]] += sums[high] - sums[low]
    now = _unevenness(loads)
    improved = True
    while improved:
        improved = False
        for edge in range(1, len(edges) - 1):
            left, right = owner[edge - 1], owner[edge]
            for step in (-1, 1):
                place = edges[edge] + step
                if left == right or not edges[edge - 1] < place < edges[edge + 1]:
                    continue
                moved = sums[place] - sums[edges[edge]]
                loads[left] += moved
                loads[right] -= moved
                # Most moves are known to be none by the slowest rank alone.
                value = now if max(loads) > now[0] else _unevenness(loads)
                if value < now:
                    now, edges[edge], improved = value, place, True
                else:
                    loads[left] -= moved
                    loads[right] += moved
    return tuple(high - low for low, high in pairwise(edges))


def _unevenness(loads: Sequence[float]) -> tuple[float, float]:
    """The slowest rank, then the sum of squares."""
    largest = max(loads)
    scale = largest or 1.0
    return largest, sum((load / scale) ** 2 for load in loads) * scale


class _FeasibleRanges:
    """How far stages can extend within a time and their memory."""

    def __init__(
        self, times: Sequence[float], num_stages: int, room: MemoryLimit | None, min_units: int
    ) -> None:
        self.sums = [0.0, *accumulate(map(float, times))]
        self.count = len(times)
        self.num_stages = num_stages
        self.min_units = min_units
        # Per stage, sums of what is limited besides time, and how much of it.
        self._beside: list[tuple[tuple[list[float], float], ...]] = [()] * num_stages
        if room is not None:
            by_held = {held: room.sums(held) for held in {*room.held}}
            limited = zip(room.held, room.limits, strict=True)
            self._beside = [((by_held[held], limit),) for held, limit in limited]

    def smallest_limit(self) -> float | None:
        sums = self.sums
        high = sums[-1]
        if self._edges(high)[-1] < self.count:
            return None
        low = max(high / self.num_stages, max(b - a for a, b in pairwise(sums)))
        while high > low * (1 + SAME):
            middle = (low + high) / 2
            edges = self._edges(middle)
            if edges[-1] < self.count:
                low = max(middle, self._next_limit(edges))
            else:
                # What this cut really needs is a limit that some stage has exactly.
                high = max([sums[end] - sums[start] for start, end in pairwise(edges)])
        return high * (1 + SAME)

    def latest(self, stage: int, start: int, limit: float) -> int:
        """Where a stage that begins there ends at the latest."""
        end = bisect_right(self.sums, self.sums[start] + limit, start)
        for sums, most in self._beside[stage]:
            end = min(end, bisect_right(sums, sums[start] + most, start))
        return max(end - 1, start)

    def earliest(self, stage: int, end: int, limit: float) -> int:
        """Where a stage that ends there begins at the earliest: the other side of ``latest``."""
        each = ((self.sums, limit), *self._beside[stage])
        return max(
            bisect_left(sums, sums[end], hi=end, key=lambda before: before + most)
            for sums, most in each
        )

    def possible_ends(self, limit: float) -> tuple[list[int], list[int]]:
        """Per stage the least and the largest end that leave all other stages a way."""
        least = self.min_units
        first, last = [self.count] * self.num_stages, []
        end = 0
        for stage in range(self.num_stages):
            end = self.latest(stage, end, limit)
            last.append(min(end, self.count - (self.num_stages - 1 - stage) * least))
        for stage in range(self.num_stages - 2, -1, -1):
            start = self.earliest(stage + 1, first[stage + 1], limit)
            first[stage] = max(start, (stage + 1) * least)
        return first, last

    def _next_limit(self, edges: list[int]) -> float:
        """The least limit at which a stage of this cut gets further."""
        sums, last = self.sums, self.count
        return min([sums[end + 1] - sums[start] for start, end in pairwise(edges) if end < last])

    def _edges(self, limit: float) -> list[int]:
        """The cut that fills each stage as far as it goes, as far as all have units."""
        edges, most = [0], self.count - (self.num_stages - 1) * self.min_units
        for stage in range(self.num_stages):
            start = edges[-1]
            edges.append(min(self.latest(stage, start, limit), most))
            if edges[-1] < start + self.min_units:
                break
            most += self.min_units
        return edges


# ------------------------------------------------------------------------------------- unit ranges
# Cuts as ranges of units: by cost alone, or as set by hand.


def balance(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Contiguous ranges of unit indices, one per stage, none empty.

    Raises:
        PlanError: There are fewer units than stages.

    >>> balance([1, 1, 1, 1, 4], 2)
    (range(0, 4), range(4, 5))
    """
    count = len(costs)
    if num_stages > count:
        raise PlanError(
            f"{num_stages} stages (pp * schedule.stages_per_rank) for a model of {count} units: a "
            f"stage needs at least one unit. Try pp * schedule.stages_per_rank <= {count}, or a "
            "deeper model."
        )
    cut = cut_chain(costs, num_stages)
    assert cut is not None  # without a memory limit there is always one
    return ranges(cut)


def by_counts(counts: Sequence[int], num_units: int, num_stages: int) -> tuple[range, ...]:
    """Ranges from the number of units per stage, set by hand; zero is allowed.

    Raises:
        PlanError: The counts do not add up, or there is not one per stage.
    """
    if len(counts) != num_stages or sum(counts) != num_units or min(counts, default=0) < 0:
        raise PlanError(
            f"units_per_stage={list(counts)} has {len(counts)} stages and {sum(counts)} units; "
            f"needed are {num_stages} stages (pp * stages_per_rank) and {num_units} units.",
            fix="Leave it out to balance by cost.",
        )
    return ranges(counts)


def ranges(counts: Sequence[int]) -> tuple[range, ...]:
    """Units of each stage, from their numbers."""
    return tuple(range(low, high) for low, high in pairwise([0, *accumulate(counts)]))


# ------------------------------------------------------------------------------------------ routes
# What the stages of a graph of units hand to which others, as the runtime does it.
#
# A tensor goes from the stage that makes it to the first stage that uses it, from there to the next
# one that does, and so on (``strategies.models.replay.layout``): a long skip passes by the stages
# between.


@dataclass(frozen=True, slots=True)
class Tensor:
    """What one unit makes and others use.

    Attributes:
        producer: Number of the unit.
        consumers: Numbers of the units that use it, all larger.
        num_bytes: Sent once per boundary that it crosses, however many use it there.
    """

    producer: int
    consumers: tuple[int, ...]
    num_bytes: float


def handed_on(
    tensors: Sequence[Tensor], units_per_stage: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    """(source, target, size) of every pair of stages between which something travels."""
    stage_of = [stage for stage, count in enumerate(units_per_stage) for _ in range(count)]
    sums: dict[tuple[int, int], float] = {}
    for tensor in tensors:
        users = {stage_of[unit] for unit in tensor.consumers}
        for ends in pairwise(sorted({stage_of[tensor.producer], *users})):
            sums[ends] = sums.get(ends, 0.0) + tensor.num_bytes
    return tuple((*ends, round(size)) for ends, size in sorted(sums.items()))


def skips(handed: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """Pairs of stages that are no neighbours."""
    return tuple((source, target) for source, target, _ in handed if target > source + 1)
