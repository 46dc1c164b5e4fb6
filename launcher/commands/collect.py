"""``mode=collect``: the comparison of a sweep's jobs, wherever and whenever they ran."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import replace
from pathlib import Path

from launcher.config import LaunchConfig, from_dict
from launcher.processes.slurm_job import settle
from launcher.processes.task import JOB_FILE, read_task
from launcher.report.sweep.files import report_sweep
from launcher.report.sweep.sweep_jobs import (
    PAGE,
    RESULT,
    TRACE,
    SweepJob,
    asked_figures,
    ended_job,
    make_sweep,
    newest_record,
    read_record,
)
from launcher.terminal import say
from strategies.errors import PipelineError
from strategies.small_file import FileRefusedError, read_text

_MOST_BYTES = 4096
_CODES = {"done": 0, "failed": 1, "preempted": 85, "pruned": 86, "interrupted": 130}
_STAMPS = (None, None)


def run(config: LaunchConfig) -> int:
    """Writes the sweep's files anew from what its jobs have left; 1 if a job has failed."""
    given = config.sweep.dir
    folder = newest_record(Path("multirun")) if given is None else Path(given).expanduser()
    folder = folder.absolute()
    record = read_record(folder)
    jobs: list[SweepJob] = []
    for index, job_dir in sorted(record.folders.items()):
        result = job_dir / RESULT
        with contextlib.suppress(PipelineError, OSError, ValueError, KeyError):
            if (told := settle(job_dir)) is not None:
                say(f"job {index}: {told}")
        if result.is_file():
            jobs.append(_ended(index, job_dir, record.overrides[index]))
        else:
            say(f"job {index} has not ended{_where(job_dir)}: {job_dir}")
    if not jobs:
        say(f"none of {len(record.overrides)} jobs has ended")
        return 0
    bare = [job for job in jobs if not job.timelines and (job.folder / TRACE).is_file()]
    if bare:
        numbers = ", ".join(str(job.index) for job in bare)
        say(
            f"no timelines of job {numbers}: {TRACE} there is from another version, which keeps "
            f"none that this one reads; each job's own {PAGE} has them"
        )
    sweep = replace(make_sweep(jobs, record.overrides), missing="have not ended")
    report_sweep(folder, sweep, metric=config.sweep.metric)
    return 1 if any(job.status == "failed" for job in jobs) else 0


def _ended(index: int, job_dir: Path, overrides: tuple[str, ...]) -> SweepJob:
    asked: dict[str, object] = {}
    # A mode that starts no ranks leaves no task; its result says enough.
    with contextlib.suppress(OSError, ValueError, KeyError, PipelineError):
        asked = asked_figures(from_dict(read_task(job_dir)["config"]))
    job = ended_job(index, job_dir, overrides, asked=asked, before=_STAMPS, exit_code=0)
    status = str(job.result.get("status", "done"))
    code = _CODES.get(status, 1)
    error = "" if code == 0 else str(job.result.get("error") or "")
    return replace(job, status=status, exit_code=code, error=error)


def _where(job_dir: Path) -> str:
    """`` (SLURM job 17: RUNNING)``, as far as it is known."""
    try:
        number = read_text(job_dir / JOB_FILE, most_bytes=_MOST_BYTES).strip()
    except (OSError, FileRefusedError):
        return ""
    try:
        state = subprocess.run(
            ["squeue", "--noheader", "--format=%T", "--jobs", number],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        state = ""
    return f" (SLURM job {number}: {state or 'no longer known'})"
