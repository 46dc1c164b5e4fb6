"""Where a chain of units is cut into stages: the slowest stage as fast as possible.

Dynamic programming over (stages, units), twice: first the smallest possible largest stage, then,
among the cuts that keep to it, the least sum of squares, so that of equally good cuts the most even
one is taken. (One pass that compares both at once is not exact: a prefix that is best by its own
largest stage need not be the most even one below the largest stage of the whole.) O(S n^2).
"""

from __future__ import annotations

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
    # best[i]: (sum of squares, start of the last stage) for the first i units.
    never = float("inf")
    best = [(value**2 if value <= limit else never, 0) for value in sums]
    starts: list[list[int]] = [[0] * (count + 1)]
    for stage in range(2, num_stages + 1):
        now = [(never, 0)] * (count + 1)
        for end in range(stage, count + 1):
            now[end] = min(
                (best[start][0] + (sums[end] - sums[start]) ** 2, start)
                if sums[end] - sums[start] <= limit
                else (never, start)
                for start in range(stage - 1, end)
            )
        starts.append([entry[1] for entry in now])
        best = now
    ranges = []
    end = count
    for stage in reversed(range(num_stages)):
        start = starts[stage][end] if stage else 0
        ranges.append(range(start, end))
        end = start
    return tuple(reversed(ranges))


def _smallest_limit(sums: Sequence[float], num_stages: int) -> float:
    """The cost of the largest stage in the best cut; ``sums[i]`` is that of the first i units."""
    best = list(sums)
    for stage in range(2, num_stages + 1):
        best = [
            min(
                (max(best[start], sums[end] - sums[start]) for start in range(stage - 1, end)),
                default=float("inf"),
            )
            for end in range(len(sums))
        ]
    return best[-1]


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
