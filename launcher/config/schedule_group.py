"""``schedule.group``: a number, the schedule's default, or left to the compiler."""

from __future__ import annotations

from launcher.config.launch import LaunchConfig
from strategies.schedules.schedule import Schedule, given_group


def schedule_group(config: LaunchConfig, schedule: Schedule) -> int | None:
    """``schedule.group``; None where the compiler takes the default, or chooses.

    Raises:
        PlanError: ``auto`` for a schedule that does not choose.
    """
    return given_group(config.schedule.group, schedule)
