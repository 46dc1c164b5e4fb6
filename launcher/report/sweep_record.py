"""``jobs.json``: which jobs a sweep consists of, for whoever compares them later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.report.atomic import write_atomically
from strategies.errors import PlanError

RECORD = "jobs.json"


@dataclass(frozen=True, slots=True)
class Record:
    """The jobs that were asked for.

    Attributes:
        overrides: ``key=value`` words of each.
        folders: Absolute, of those that have begun, in the same order.
    """

    overrides: tuple[tuple[str, ...], ...]
    folders: tuple[Path, ...]


def write_record(folder: Path, overrides: Sequence[Sequence[str]], folders: Sequence[Path]) -> None:
    """Writes the record; of jobs that have not begun the folder is null."""
    jobs = [
        {"overrides": list(words), "folder": str(folders[i]) if i < len(folders) else None}
        for i, words in enumerate(overrides)
    ]
    write_atomically(folder / RECORD, json.dumps({"jobs": jobs}, indent=1) + "\n")


def read_record(folder: Path) -> Record:
    """Reads the record of a sweep's folder.

    Raises:
        PlanError: There is none.
    """
    file = folder / RECORD
    try:
        jobs = json.loads(file.read_text())["jobs"]
        return Record(
            tuple(tuple(map(str, job["overrides"])) for job in jobs),
            tuple(Path(job["folder"]) for job in jobs if job["folder"] is not None),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{folder} is no sweep's folder: {file.name} in it cannot be read ({error}). "
            "Try sweep.dir=FOLDER with the folder that -m has named."
        ) from None


def newest_record(root: Path) -> Path:
    """The folder of the newest sweep below a folder.

    Raises:
        PlanError: There is none.
    """
    found = sorted(root.glob(f"**/{RECORD}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise PlanError(
            f"mode=collect compares the jobs of a sweep, and there is none below {root}. "
            "Try sweep.dir=FOLDER with the folder that -m has named."
        )
    return found[-1].parent
