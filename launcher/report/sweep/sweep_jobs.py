"""What a sweep keeps of a job that has ended: its figures and the timelines that it drew."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoints import ahead, believed, date
from launcher.config import LaunchConfig
from launcher.report.predicted import read_timelines
from launcher.report.result import write_atomically
from launcher.report.rows import TimelineData
from launcher.report.sweep.loss_curves import LossCurve, NamedCurve, read_curve
from launcher.terminal import say
from strategies.errors import PlanError
from strategies.small_file import read_json

_STATUSES = {
    None: "interrupted",
    0: "done",
    2: "refused",
    85: "preempted",
    86: "pruned",
    130: "interrupted",
}
RESULT, TRACE, PAGE = "result.json", "trace.json", "timeline.html"
METRICS = "metrics.csv"
# Identities of the two files that are read, ``RESULT`` and ``TRACE``; None for one that is missing.
Stamps = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job of a sweep.

    Attributes:
        index: Its number, from 0, in the order of running.
        overrides: ``key=value`` as the command line gave them to this job.
        status: ``done``, ``failed``, ``refused`` (exit 2), ``preempted`` or ``interrupted``.
        exit_code: Of its command; None where that did not end by itself.
        result: The mapping of result.json; of a job that left none, what was asked for.
        timelines: Predicted first; empty for a mode that draws none.
        curve: How a training run has learnt.
    """

    index: int
    folder: Path
    overrides: tuple[str, ...]
    status: str
    exit_code: int | None
    error: str
    result: Mapping[str, object]
    timelines: tuple[TimelineData, ...]
    curve: LossCurve | None = None

    @property
    def time_unit(self) -> str | None:
        """``F`` or ``s``, None where nothing was simulated."""
        unit = self.result.get("time_unit")
        return unit if isinstance(unit, str) else None


def file_stamps(folder: Path) -> Stamps:
    """Tells files that a job writes from those that an earlier sweep left in the same folder."""
    return tuple(_stamp(folder / name) for name in (RESULT, TRACE))


def ended_job(
    index: int,
    folder: Path,
    overrides: Sequence[str],
    *,
    asked: Mapping[str, object],
    before: Stamps,
    exit_code: int | None,
    error: str = "",
) -> SweepJob:
    """Reads what a job left in its folder; to be called before the next job starts.

    ``overrides``: its overrides; Hydra's own keys are left out.
    ``asked``: what its configuration alone says; counts where it has left no result.
    ``before``: ``file_stamps`` of the folder before it started.
    ``exit_code``: None for a job that was interrupted.
    ``error``: what ended it; a failed job's result.json may know it as well.
    """
    after = file_stamps(folder)
    fresh = [new is not None and new != old for new, old in zip(after, before, strict=True)]
    result = _read_result(folder / RESULT) if fresh[0] else {}
    timelines = _read_timelines(folder / TRACE) if fresh[1] else ()
    status = _STATUSES.get(exit_code, "failed")
    return SweepJob(
        index=index,
        folder=folder,
        overrides=tuple(w for w in overrides if not w.lstrip("+").startswith("hydra.")),
        status=status,
        exit_code=exit_code,
        error="" if status == "done" else error or str(result.get("error") or ""),
        result=result or asked,
        timelines=timelines,
        curve=read_curve(folder / METRICS) if fresh[0] else None,
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _read_result(path: Path) -> dict[str, object]:
    try:
        found = read_json(path, most_bytes=_MOST_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def asked_figures(config: LaunchConfig) -> dict[str, object]:
    """The keys of result.json that the configuration alone decides."""
    known: dict[str, object] = {
        "mode": config.mode,
        "schedule": config.schedule.name,
        "pp": config.pp,
        "dp": config.dp,
        "tp": config.tp,
        "ep": config.ep,
        "num_microbatches": config.num_microbatches,
    }
    return {key: value for key, value in known.items() if value != "auto"}


def _read_timelines(path: Path) -> tuple[TimelineData, ...]:
    try:
        return read_timelines(path)
    except (OSError, ValueError):
        return ()


# What tells the jobs of a sweep apart: the overrides whose values differ.


@dataclass(frozen=True, slots=True)
class Sweep:
    """The jobs of a sweep that have ended, and what varies among all that were asked for.

    Attributes:
        num_jobs: How many were asked for; more than ``jobs`` where a sweep ended early.
        varied: Keys of overrides with more than one value, in the order of the command line.
        missing: What is said of the jobs that were asked for and are not here.
    """

    jobs: tuple[SweepJob, ...]
    num_jobs: int
    varied: tuple[str, ...]
    missing: str = "did not run"

    def label(self, job: SweepJob) -> str:
        """``schedule=1f1b pp=2``; all of its overrides where nothing varies."""
        return self.label_of(job.index, job.overrides)

    @property
    def curves(self) -> tuple[NamedCurve, ...]:
        """Of the jobs that have trained, whether they have come to their end or not."""
        return tuple(NamedCurve(self.label(j), j.curve) for j in self.jobs if j.curve is not None)

    def label_of(self, index: int, overrides: Sequence[str]) -> str:
        given = override_values(overrides)
        keys = self.varied or tuple(key for key in given if key != "mode")
        words = [f"{key}={given[key]}" for key in keys if key in given]
        return " ".join(words) or f"job {index}"


def make_sweep(jobs: Sequence[SweepJob], asked: Sequence[Sequence[str]]) -> Sweep:
    # How the sweep is run, and where, makes no job another one.
    values = [
        override_values([w for w in words if not w.lstrip("+").startswith(("sweep.", "hydra."))])
        for words in asked
    ]
    keys = list(dict.fromkeys(key for given in values for key in given))
    varied = tuple(key for key in keys if len({given.get(key) for given in values}) > 1)
    return Sweep(tuple(jobs), len(asked), varied)


def override_values(words: Sequence[str]) -> dict[str, str]:
    """``key=value`` words as a mapping; of a key that is given twice the last one counts."""
    pairs = (word.lstrip("+").partition("=") for word in words)
    return {key: value for key, _, value in pairs}


# ``jobs.json``: which jobs a sweep consists of, for whoever compares them later.

RECORD = "jobs.json"
# What a sweep writes into its folder, beside the jobs' folders.
OWN_FILES = frozenset(
    {RECORD, "multirun.yaml", "sweep.csv", "sweep.html", "sweep.json", "sweep.png"}
)
_MOST_BYTES = 1 << 26
_MOST_SECONDS = 1e11


@dataclass(frozen=True, slots=True)
class Record:
    """The jobs that were asked for; folders are absolute, by number, of those that have begun.

    ``begun``: when the sweep began, in seconds since the epoch; 0 where it does not say.
    """

    overrides: tuple[tuple[str, ...], ...]
    folders: Mapping[int, Path]
    begun: float = 0.0


def write_record(
    folder: Path,
    overrides: Sequence[Sequence[str]],
    folders: Mapping[int, Path],
    *,
    begun: float,
) -> None:
    """Writes the record; of jobs that have not begun the folder is null."""
    jobs = [
        {"overrides": list(words), "folder": str(folders[i]) if i in folders else None}
        for i, words in enumerate(overrides)
    ]
    write_atomically(folder / RECORD, json.dumps({"begun": begun, "jobs": jobs}, indent=1) + "\n")


def read_record(folder: Path, *, key: str = "sweep.dir") -> Record:
    file = folder / RECORD
    try:
        content = read_json(file, most_bytes=_MOST_BYTES)
        jobs, begun = content["jobs"], content.get("begun", 0.0)
        if type(begun) not in (int, float) or not 0 <= begun < _MOST_SECONDS:
            raise ValueError("begun is no number of seconds")
        return Record(
            tuple(tuple(map(str, job["overrides"])) for job in jobs),
            {i: Path(job["folder"]) for i, job in enumerate(jobs) if job["folder"] is not None},
            begun,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, LookupError | TypeError | AttributeError):
            reason = "it is no list of jobs"
        raise PlanError(
            f"{folder} is no sweep's folder: {file.name} in it cannot be read ({reason}). "
            f"Try {key}=FOLDER with the folder that -m has named."
        ) from None


def newest_record(root: Path, *, key: str = "sweep.dir") -> Path:
    """The folder of the sweep that began last, by its record; ``key`` names another one.

    The times of files do not matter, which change where folders are copied or restored. Says what
    was skipped, and among how many it was chosen.
    """
    known: list[tuple[float, Path]] = []
    for file in sorted(root.glob(f"**/{RECORD}")):
        try:
            said = read_record(file.parent).begun
            known.append((believed(said), file.parent))
            if said != believed(said):
                say(f"of {file.parent} {ahead(said)}")
        except PlanError as error:
            say(f"skips {file.parent}: {error}")
    if not known:
        raise PlanError(
            f"there is no sweep below {root}. Try {key}=FOLDER with the folder that -m has named."
        )
    begun, folder = max(known)
    if len(known) > 1:
        when = (
            f"it began last, {date(begun)}"
            if begun
            else "the last by name, none says when it began"
        )
        say(f"chosen among {len(known)} sweeps below {root}: {folder} ({when})")
    return folder
