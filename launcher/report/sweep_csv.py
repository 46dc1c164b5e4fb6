"""sweep.csv and sweep.json: every job's figures exactly as in its result.json.

The columns of sweep.csv, in this order:

- ``job folder status label``: number, folder below the sweep's own, how it ended (``done failed
  refused preempted interrupted``), and the overrides that tell it from the others;
- a column per varied override, under its key, with the value as typed. Keys that have a column
  below, ``schedule`` or ``pp`` say, get none of their own;
- ``schedule pp dp tp stages_per_rank num_microbatches``;
- predicted: ``makespan period bubble_ratio peak_activations_max peak_memory_bytes_max
  exposed_grad_reduce bound_gap gap_to_ideal weight_copies`` and their ``time_unit``; ``_max`` is
  the largest of all ranks;
- of runs: ``step_time_s predicted_step_time_s measured_bubble_ratio measured_makespan_s
  measured_period_s measured_exposed_grad_reduce_s predicted_peak_memory_bytes_max loss_last
  val_loss tokens_per_s``; their ``peak_memory_bytes_max`` is measured as well;
- ``error``.

A cell is empty where a job has no such figure.
"""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

from launcher.report.atomic import write_atomically
from launcher.report.sweep_figures import FIGURES, PREDICTED
from launcher.report.sweep_job import SweepJob
from launcher.report.sweep_labels import Sweep, override_values

_JOB = ("job", "folder", "status", "label")
_SHAPE = ("schedule", "pp", "dp", "tp", "stages_per_rank", "num_microbatches")
_PREDICTED = tuple(figure.name for figure in PREDICTED)
_MEASURED = tuple(name for name in FIGURES if name not in _PREDICTED)
FIXED = (*_JOB, *_SHAPE, *_PREDICTED, "time_unit", *_MEASURED, "error")


def columns(sweep: Sweep) -> tuple[str, ...]:
    """The header of ``sweep.csv``."""
    own = tuple(key for key in sweep.varied if key not in FIXED)
    return (*_JOB, *own, *FIXED[len(_JOB) :])


def write_sweep_csv(path: Path, sweep: Sweep) -> None:
    """Writes ``sweep.csv``, a row per job in the order of running."""
    file = io.StringIO()
    writer = csv.DictWriter(file, columns(sweep), lineterminator="\n")
    writer.writeheader()
    for job in sweep.jobs:
        writer.writerow(_row(sweep, job, path.parent))
    write_atomically(path, file.getvalue())


def write_sweep_json(path: Path, sweep: Sweep) -> None:
    """Writes ``sweep.json``: the same jobs with the whole of their result.json."""
    jobs = [
        {
            "job": job.index,
            "folder": relative_folder(job, path.parent),
            "status": job.status,
            "exit_code": job.exit_code,
            "label": sweep.label(job),
            "overrides": override_values(job.overrides),
            "error": job.error or None,
            "result": job.result,
        }
        for job in sweep.jobs
    ]
    content = {"num_jobs": sweep.num_jobs, "varied": sweep.varied, "jobs": jobs}
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def relative_folder(job: SweepJob, folder: Path) -> str:
    """A job's folder as seen from the sweep's."""
    return Path(os.path.relpath(job.folder, folder)).as_posix()


def _row(sweep: Sweep, job: SweepJob, folder: Path) -> dict[str, object]:
    given = override_values(job.overrides)
    row: dict[str, object] = {key: given.get(key) for key in sweep.varied if key not in FIXED}
    row |= {
        "job": job.index,
        "folder": relative_folder(job, folder),
        "status": job.status,
        "label": sweep.label(job),
    }
    row |= {key: job.result.get(key) for key in (*_SHAPE, "time_unit")}
    row |= {name: figure.value(job) for name, figure in FIGURES.items()}
    row["error"] = job.error
    return row
