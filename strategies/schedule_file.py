"""A schedule that somebody wrote down, as a value: hashable, and free of the file it came from.

Ranks compile the same plan as their parent, so a plan carries the text and not a path: what is read
once is what runs, whatever becomes of the file. ``strategies.schedules.custom`` reads the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from strategies.errors import PlanError

# A row of a million instructions; a mistyped path to a data set or device ends here.
_MAX_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ScheduleFile:
    """The content of ``schedule.file``.

    Attributes:
        name: What messages call it: the path as it was given.
        text: Its whole content.
        placement: ``loop``, ``v`` or ``bidirectional``; None to take it from the rows.
    """

    name: str
    text: str = field(repr=False)
    placement: str | None = None


def read_schedule_file(path: str, *, placement: str | None = None) -> ScheduleFile:
    """Reads a schedule's CSV.

    Args:
        path: Relative to the working directory, or absolute.
        placement: As in ``ScheduleFile``.

    Raises:
        PlanError: There is no such file, or it is not text.
    """
    file = Path(path).expanduser()
    try:
        if not file.is_file():
            state = "is not a file" if file.exists() else f"does not exist in {Path.cwd()}"
            raise PlanError(f"schedule.file={path} {state}. Try schedule.file=/path/to/my.csv.")
        size = file.stat().st_size
        if size > _MAX_BYTES:
            raise PlanError(
                f"schedule.file={path} has {size} bytes, a schedule at most {_MAX_BYTES}. "
                "Try schedule.file=/path/to/my.csv."
            )
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise PlanError(
            f"schedule.file={path} cannot be read: {error.strerror}. "
            "Try schedule.file=/path/to/my.csv."
        ) from error
    except ValueError as error:  # Not UTF-8, or a path with a null byte.
        raise PlanError(
            f"schedule.file={path} is not UTF-8 text. Save it as CSV (comma separated, UTF-8)."
        ) from error
    return ScheduleFile(path, text, placement)
