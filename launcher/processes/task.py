"""``resolved.json``: what every rank of a run reads, written before the first one starts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.config import dump, from_dict
from launcher.config.running import OutputConfig
from launcher.report.result import write_atomically
from launcher.resolve import Run, resolve
from strategies.plan import ScheduleFile
from strategies.small_file import read_json

TASK = "resolved.json"
JOB_FILE = "slurm_job.txt"  # beside it: the number of a job that was submitted
_MOST_BYTES = 1 << 26


def write_task(run: Run, run_dir: Path, checkpoint: Path | None) -> dict[str, Any]:
    """Writes the task of a run, and returns it.

    The identity for trackers stays that of an earlier task in the folder: what goes on there is the
    same training.
    """
    config = dump(run.config)
    config["dp"] = run.dp
    file = run.plan.file
    task = {
        "config": config,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        # The text and not the path: what has been verified here is what runs there.
        "schedule_file": None if file is None else asdict(file),
        "run_id": run_id(run_dir) or secrets.token_hex(4),
    }
    rewrite_task(run_dir, task)
    return task


def rewrite_task(run_dir: Path, task: Mapping[str, Any]) -> None:
    write_atomically(run_dir / TASK, json.dumps(task, indent=1))


def read_task(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(run_dir / TASK, most_bytes=_MOST_BYTES)
    return found


def resolve_task(task: Mapping[str, Any]) -> Run:
    file = task["schedule_file"]
    return resolve(from_dict(task["config"]), None if file is None else ScheduleFile(**file))


def task_umask(task: Mapping[str, Any]) -> int:
    """Who may read what the ranks of a task write."""
    return OutputConfig(**task["config"].get("output", {})).umask


def run_id(run_dir: Path) -> str | None:
    """The identity under which trackers know the training in a folder; None for an empty one."""
    try:
        return str(read_task(run_dir)["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
