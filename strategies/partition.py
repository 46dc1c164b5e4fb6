"""Where a chain of units is cut into stages: the slowest stage as fast as possible.

First the smallest possible largest stage, by bisection (a greedy cut tells whether a limit can be
kept), then, among the cuts that keep to it, the least sum of squares by dynamic programming: of
equally good cuts the most even one is taken. Exact. Both look only at starts within the limit,
which is O(n^2) over all stages together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from strategies.errors import PlanError


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
    sums = [0.0, *accumulate(float(cost) for cost in costs)]
    limit = _smallest_limit(sums, num_stages)
    first, last = _possible_ends(sums, num_stages, limit)
    # best[i]: sum of squares for the first i units, where the stages so far keep to the limit.
    best = {0: 0.0}
    starts: list[dict[int, int]] = []
    for stage in range(num_stages):
        now: dict[int, float] = {}
        chosen: dict[int, int] = {}
        for end in range(first[stage], last[stage] + 1):
            start = end - 1
            while start >= 0 and sums[end] - sums[start] <= limit:
                squares = best.get(start)
                if squares is not None:
                    squares += (sums[end] - sums[start]) ** 2
                    # Of equal cuts the one with the earliest starts.
                    if end not in now or squares <= now[end]:
                        now[end], chosen[end] = squares, start
                start -= 1
        starts.append(chosen)
        best = now
    ranges = []
    end = count
    for chosen in reversed(starts):
        ranges.append(range(chosen[end], end))
        end = chosen[end]
    return tuple(reversed(ranges))


def _smallest_limit(sums: Sequence[float], num_stages: int) -> float:
    """The cost of the largest stage in the best cut; ``sums[i]`` is that of the first i units."""
    low = max(high - before for before, high in pairwise(sums))
    ends = _greedy(sums, low)
    if len(ends) - 1 <= num_stages:
        return low
    limit = sums[-1] - sums[0]
    while True:
        middle = (low + limit) / 2
        if not low < middle < limit:
            return limit
        ends = _greedy(sums, middle)
        if len(ends) - 1 <= num_stages:
            # What this cut really needs is a limit that some stage has exactly.
            limit = max(sums[end] - sums[start] for start, end in pairwise(ends))
        else:
            low = middle


def _greedy(sums: Sequence[float], limit: float) -> list[int]:
    """Edges of the cut that fills each stage up to the limit; no unit alone exceeds it."""
    edges = [0]
    while edges[-1] < len(sums) - 1:
        edges.append(_furthest(sums, edges[-1], limit))
    return edges


def _furthest(sums: Sequence[float], start: int, limit: float) -> int:
    end = max(start + 1, bisect_right(sums, sums[start] + limit, start) - 1)
    # The sum may round across the limit where the difference does not, and the other way round.
    while end + 1 < len(sums) and sums[end + 1] - sums[start] <= limit:
        end += 1
    while end > start + 1 and sums[end] - sums[start] > limit:
        end -= 1
    return end


def _possible_ends(
    sums: Sequence[float], num_stages: int, limit: float
) -> tuple[list[int], list[int]]:
    """Per stage the least and the largest end that leave all other stages a way."""
    count = len(sums) - 1
    last = []
    end = 0
    for stage in range(num_stages):
        end = min(_furthest(sums, end, limit) if end < count else end, count)
        last.append(min(end, count - (num_stages - 1 - stage)))
    first = [count] * num_stages
    for stage in range(num_stages - 2, -1, -1):
        end = first[stage + 1]
        start = end - 1
        while start > 0 and sums[end] - sums[start - 1] <= limit:
            start -= 1
        first[stage] = max(start, stage + 1)
    return first, last


def by_counts(counts: Sequence[int], num_units: int, num_stages: int) -> tuple[range, ...]:
    """Ranges from the number of units per stage, set by hand; zero is allowed.

    Raises:
        PlanError: The counts do not add up, or there is not one per stage.
    """
    if len(counts) != num_stages or sum(counts) != num_units or min(counts, default=0) < 0:
        raise PlanError(
            f"units_per_stage={list(counts)} has {len(counts)} stages and {sum(counts)} units; "
            f"needed are {num_stages} stages (pp * stages_per_rank) and {num_units} units. "
            "Leave it out to balance by cost."
        )
    edges = [0, *accumulate(counts)]
    return tuple(range(low, high) for low, high in pairwise(edges))
