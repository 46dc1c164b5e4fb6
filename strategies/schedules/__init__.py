"""The registry of schedules: one file per schedule, one line here, one YAML in conf/schedule."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points

from strategies.errors import PlanError
from strategies.schedules.foldx_aiao import FOLDX_AIAO
from strategies.schedules.foldx_fifo import FOLDX_FIFO
from strategies.schedules.gpipe import GPIPE
from strategies.schedules.interleaved_1f1b import INTERLEAVED_1F1B
from strategies.schedules.naive import NAIVE
from strategies.schedules.one_f_one_b import ONE_F_ONE_B
from strategies.schedules.schedule import Rows, Schedule, Shape

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (NAIVE, GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, FOLDX_FIFO, FOLDX_AIAO)
}

__all__ = ["SCHEDULES", "Rows", "Schedule", "Shape", "find_schedule", "register_schedule"]


def register_schedule(
    name: str,
    *,
    placement: str = "loop",
    stages_per_rank: int = 1,
    virtual_stages: bool = False,
    grouped: bool = False,
) -> Callable[[Callable[[Shape], Rows]], Callable[[Shape], Rows]]:
    """Decorator that puts a function ``Shape -> rows`` into the registry.

    Raises:
        PlanError: The name is taken.
    """

    def add(order: Callable[[Shape], Rows]) -> Callable[[Shape], Rows]:
        if name in SCHEDULES:
            raise PlanError(f"schedule={name} is registered already. Choose another name.")
        SCHEDULES[name] = Schedule(
            name, order, placement, stages_per_rank, virtual_stages, grouped=grouped
        )
        return order

    return add


def find_schedule(name: str) -> Schedule:
    """The schedule of that name, also from the entry points ``foldpipe.schedules``.

    Raises:
        PlanError: Nobody registered it; the message names the nearest ones.
    """
    if name not in SCHEDULES:
        for entry in entry_points(group="foldpipe.schedules"):
            if entry.name == name:
                entry.load()  # Importing the module runs its @register_schedule.
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=3) or sorted(SCHEDULES)
        raise PlanError(f"schedule={name} is unknown. Did you mean schedule={' or '.join(near)}?")
    return SCHEDULES[name]
