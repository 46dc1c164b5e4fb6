"""``schedule=``: the registry's entry, or the file that ``custom`` takes its order from."""

from __future__ import annotations

from launcher.config.launch import LaunchConfig
from strategies.schedule_file import ScheduleFile, read_schedule_file
from strategies.schedules import find_schedule
from strategies.schedules.schedule import Schedule


def given_schedule(
    config: LaunchConfig, file: ScheduleFile | None = None
) -> tuple[Schedule, ScheduleFile | None]:
    """The schedule that was asked for.

    Args:
        config: ``schedule.file`` is relative to the working directory.
        file: Its content, where somebody has read it already: on a rank, that is the parent.

    Returns:
        The schedule, and the content of its file if it has one.

    Raises:
        PlanError: There is no such schedule or file, or the file is for another pp.
        ProgramError: The file is wrong; the message has line and column.
    """
    asked = config.schedule
    if file is None and asked.file is not None:
        file = read_schedule_file(asked.file, placement=asked.placement)
    return find_schedule(asked.name, file=file, pp=config.pp), file
