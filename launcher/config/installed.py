"""Names that other installed distributions offer; nothing of theirs is imported here."""

from __future__ import annotations

from importlib.metadata import entry_points

# Option on the command line -> entry point group.
ENTRY_POINTS = {
    "model": "foldpipe.models",
    "data": "foldpipe.data",
    "schedule": "foldpipe.schedules",
}


def installed_names(option: str) -> tuple[str, ...]:
    """Names for ``model=``, ``data=`` or ``schedule=`` beyond our own, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINTS[option])}))
