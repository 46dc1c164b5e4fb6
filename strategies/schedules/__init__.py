"""The registry of schedules: one file per schedule, one line here, one YAML in conf/schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from strategies.errors import PlanError
from strategies.plan import ScheduleFile
from strategies.schedules.chimera import CHIMERA
from strategies.schedules.custom import NAME as CUSTOM
from strategies.schedules.custom import custom_schedule
from strategies.schedules.dualpipe import DUALPIPE
from strategies.schedules.dualpipe_v import DUALPIPE_V
from strategies.schedules.eager_1f1b import EAGER_1F1B
from strategies.schedules.foldx import FOLDX
from strategies.schedules.foldx_aiao import FOLDX_AIAO
from strategies.schedules.foldx_fifo import FOLDX_FIFO
from strategies.schedules.gpipe import GPIPE
from strategies.schedules.hanayo import HANAYO
from strategies.schedules.interleaved_1f1b import INTERLEAVED_1F1B
from strategies.schedules.interleaved_zb import INTERLEAVED_ZB
from strategies.schedules.looped_bfs import LOOPED_BFS
from strategies.schedules.naive import NAIVE
from strategies.schedules.one_f_one_b import ONE_F_ONE_B
from strategies.schedules.pipedream import PIPEDREAM
from strategies.schedules.pipedream_2bw import PIPEDREAM_2BW
from strategies.schedules.schedule import Durations, Rows, Schedule, Shape
from strategies.schedules.synonym import meant_schedule
from strategies.schedules.v_half import V_HALF
from strategies.schedules.v_min import V_MIN
from strategies.schedules.zb_h1 import ZB_H1
from strategies.schedules.zb_h2 import ZB_H2
from strategies.schedules.zb_v import ZB_V

Order = Callable[[Shape], Rows]

# All that make their order themselves; ``custom`` has it from a file.
SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        NAIVE,
        GPIPE,
        ONE_F_ONE_B,
        EAGER_1F1B,
        INTERLEAVED_1F1B,
        INTERLEAVED_ZB,
        LOOPED_BFS,
        HANAYO,
        ZB_H1,
        ZB_H2,
        ZB_V,
        V_HALF,
        V_MIN,
        FOLDX,
        FOLDX_FIFO,
        FOLDX_AIAO,
        CHIMERA,
        DUALPIPE,
        DUALPIPE_V,
        PIPEDREAM,
        PIPEDREAM_2BW,
    )
}

__all__ = [
    "SCHEDULES",
    "Durations",
    "Rows",
    "Schedule",
    "Shape",
    "find_schedule",
    "register_schedule",
]


def register_schedule(name: str, **options: Any) -> Callable[[Order], Order]:  # noqa: ANN401
    """Decorator that puts a function ``Shape -> rows`` into the registry.

    Args:
        name: What people type after ``schedule=``.
        options: Fields of ``Schedule``, as ``placement="v"`` or ``splits_backward=True``.

    Raises:
        PlanError: The name is taken, there is no such placement, or less than one stage.
    """

    def add(order: Order) -> Order:
        if name in SCHEDULES or name == CUSTOM:
            raise PlanError(f"schedule={name} is registered already.", fix="Choose another name.")
        SCHEDULES[name] = Schedule(name, order, **options)
        return order

    return add


def find_schedule(name: str, *, file: ScheduleFile | None = None, pp: int = 1) -> Schedule:
    """The schedule of that name, also from the entry points ``foldpipe.schedules``.

    Args:
        name: What people type after ``schedule=``.
        file: For ``custom``, which takes its order from there.
        pp: The ranks that the file must be for.

    Raises:
        PlanError: It is not registered; the message names the nearest ones. Or there is a file and
            the schedule is not ``custom``, or the other way round.
        ProgramError: The file is wrong; the message has line and column.
    """
    if name == CUSTOM:
        if file is None:
            raise PlanError(
                f"schedule={CUSTOM} takes its order from a file. "
                f"Try schedule={CUSTOM} schedule.file=my.csv."
            )
        return custom_schedule(file, pp=pp)
    if file is not None:
        raise PlanError(
            f"schedule.file={file.name} belongs to schedule={CUSTOM}, but schedule={name}. "
            f"Try schedule={CUSTOM} schedule.file={file.name}."
        )
    if name not in SCHEDULES:
        for entry in entry_points(group="foldpipe.schedules"):
            if entry.name == name:
                _load(entry)
    if name not in SCHEDULES:
        known = [*SCHEDULES, CUSTOM]
        hint = meant_schedule(name, known)
        if not hint and (near := get_close_matches(name.strip().lower(), known, n=3)):
            hint = f" Did you mean schedule={' or '.join(near)}?"
        listed = ", ".join(sorted(known))
        hint = hint or f" Try schedule=1f1b, or another of {listed}."
        raise PlanError(f"schedule={name} is unknown.{hint}")
    return SCHEDULES[name]


def _load(entry: EntryPoint) -> None:
    """Imports what an entry point names; importing its module may register it already."""
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"schedule={entry.name} is offered by an installed package as {entry.value}, which "
            f"cannot be imported: {error}.",
            fix="Repair or uninstall that package.",
        ) from error
    if entry.name in SCHEDULES:
        return
    if isinstance(found, Schedule):
        SCHEDULES[entry.name] = replace(found, name=entry.name)
    elif callable(found):
        register_schedule(entry.name)(found)
