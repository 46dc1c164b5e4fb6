"""``schedule.group``: a number, the schedule's default, or left to the compiler."""

from __future__ import annotations

from launcher.config.launch import LaunchConfig
from strategies.errors import PlanError
from strategies.schedules.schedule import Schedule


def schedule_group(config: LaunchConfig, schedule: Schedule) -> int | None:
    """``schedule.group``; None where the compiler takes the default, or chooses.

    Raises:
        PlanError: ``auto`` for a schedule that does not choose.
    """
    group = config.schedule.group
    if group != "auto":
        return group
    if not schedule.chooses_group:
        raise PlanError(
            f"schedule.group=auto: {schedule.name} does not choose its group. Try schedule=foldx, "
            f"or schedule.group={config.pp}."
        )
    return None
