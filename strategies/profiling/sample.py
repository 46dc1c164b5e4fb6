"""Which units of a model are measured, and how they lie in stages.

One unit of every class lies in a stage alone; runs of two lengths tell what a stage takes by itself
from what its units take. All other units are left out: they are like those that were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Parameters of a sample beyond which the longer run is left out: it would not fit beside.
_LARGE = 400_000_000


@dataclass(frozen=True, slots=True)
class Sample:
    """A cut of some units.

    Attributes:
        units: Their places in the model, ascending.
        stages: Ranges of ``units``.
        singles: Per class, the stage in which a unit of it lies alone.
    """

    units: tuple[int, ...]
    stages: tuple[range, ...]
    singles: tuple[int, ...]


def sample_units(classes: Sequence[int], parameters: Sequence[int]) -> Sample:
    """A sample of a model.

    Args:
        classes: Of every unit, in order; numbered by first appearance.
        parameters: Of every unit.

    >>> sample = sample_units([0, 1, 2, 1, 2, 1, 2, 1, 2, 3], [1] * 10)
    >>> sample.units, [len(stage) for stage in sample.stages]
    ((0, 1, 2, 3, 4, 5, 6, 7, 8, 9), [1, 1, 1, 2, 4, 1])
    """
    first: dict[int, int] = {}
    for place, kind in enumerate(classes):
        first.setdefault(kind, place)
    chosen = set(first.values())
    repeated = {kind for kind in first if classes.count(kind) > 1}
    rest = [p for p, kind in enumerate(classes) if kind in repeated and p not in chosen]
    block = len(repeated)
    runs: list[list[int]] = [rest[:block]] if len(rest) >= block > 0 else []
    longer = rest[block : 3 * block]
    counted = [*chosen, *(place for run in runs for place in run), *longer]
    if len(longer) == 2 * block > 0 and sum(parameters[p] for p in counted) <= _LARGE:
        runs.append(longer)
    groups = sorted([[place] for place in chosen] + runs)
    # A run must lie between others' places: what is alone inside it would cut it in two.
    runs_apart = [
        group
        for group in groups
        if len(group) == 1 or not any(group[0] < place < group[-1] for place in chosen)
    ]
    units = tuple(place for group in runs_apart for place in group)
    bounds = [0]
    for group in runs_apart:
        bounds.append(bounds[-1] + len(group))
    stages = tuple(map(range, bounds, bounds[1:]))
    alone = {classes[group[0]]: stage for stage, group in enumerate(runs_apart) if len(group) == 1}
    return Sample(units, stages, tuple(alone[kind] for kind in sorted(first)))
