"""What another order of a model's branches would save: the runtime keeps the order of its step.

A stage is a run of the units in the order in which the model's own code calls them, so a cut that
mixes branches cannot run as it is. Where one would send less, the user can call the layers in the
order that it needs.
"""

from __future__ import annotations

from launcher.workloads.traced_shape import TracedShape
from strategies.planner.graph import UnitGraph, crossing_bytes
from strategies.planner.ilp import cut_by_ilp

_LESS = 0.99
_MOST_NAMES = 12


def better_order(shape: TracedShape, units: tuple[int, ...], *, balance_ratio: float) -> str | None:
    """A sentence about the order of calls that sends less; None where there is none.

    Args:
        shape: The traced model.
        units: Units per stage of the plan.
        balance_ratio: As ``planner.balance_ratio``.
    """
    if len(units) < 2 or shape.is_chain:
        return None
    loads = shape.loads(1)
    times = [
        max(1.0, load.forward_flops + sum(load.backward_flops or (0.0, 0.0))) for load in loads
    ]
    graph = UnitGraph(tuple(times), shape.graph(1).tensors)
    known = [stage for stage, count in enumerate(units) for _ in range(count)]
    free = cut_by_ilp(graph, len(units), balance_ratio=balance_ratio)
    now, then = crossing_bytes(graph, known), crossing_bytes(graph, free)
    if then >= _LESS * now:
        return None
    order = sorted(range(len(free)), key=lambda unit: (free[unit], unit))
    names = [shape.trace.units[unit].name for unit in order]
    more = f", ... ({len(names)} in all)" if len(names) > _MOST_NAMES else ""
    return (
        f"branches in another order would send {1 - then / now:.0%} less between stages; the "
        "runtime keeps the order of your step. Try calling its layers in this one: "
        f"{', '.join(names[:_MOST_NAMES])}{more}"
    )
