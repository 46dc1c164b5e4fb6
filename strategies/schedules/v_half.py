"""V-Half

PICTURE
"""

from __future__ import annotations

from functools import lru_cache, partial

from strategies.ir.placement import v
from strategies.schedules.best_order import (
    NEVER,
    best_order,
    blocks,
    by_makespan,
    equal_durations,
    generated_order,
)
from strategies.schedules.schedule import Rows, Schedule, Shape

_REGULAR = blocks(
    [(2.0, 1.0, 2.0, 1.0)], turns=range(6), spares=[2, NEVER], patiences=[0.0]
)
_RECIPES = (
    *blocks([(1.5, 1.5, 1.5, 1.5)], turns=[3, 2, 5], spares=[3, 2], patiences=[0.5, 0.0]),
    *blocks([(2.0, 1.0, 2.0, 1.0)], turns=[2, 3], spares=[3, 2], patiences=[0.5, 0.0]),
    *blocks([(1.0, 3.0, 3.0, 3.0)], turns=[1, 0], spares=[2, 1], patiences=[0.0]),
)


def order(shape: Shape) -> Rows:
    """The regular order for equal costs, else the best one found."""
    if shape.durations is None or shape.durations.equal:
        return _regular(shape.pp, shape.num_microbatches)
    return best_order(
        v(shape.pp),
        shape.num_microbatches,
        shape.durations,
        caps=_caps(shape.pp),
        regular=partial(_regular, shape.pp),
        recipes=_RECIPES,
        goal=by_makespan,
    )


@lru_cache(maxsize=64)
def _regular(pp: int, num_microbatches: int) -> Rows:
    """The paper's building block, repeated and squeezed; the best of a few turns of the V."""
    placement = v(pp)
    return generated_order(
        placement,
        num_microbatches,
        equal_durations(placement),
        caps=_caps(pp),
        recipes=_REGULAR,
        goal=by_makespan,
    )


def _caps(pp: int) -> tuple[int, ...]:
    """In pairs of stage and microbatch, two of which are a rank's activations of a microbatch."""
    return (2 * ((pp + 2) // 2),) * pp


V_HALF = Schedule(
    "v_half", order, placement="v", stages_per_rank=2, cost_aware=True, splits_backward=True
)
