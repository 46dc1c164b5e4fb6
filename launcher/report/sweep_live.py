"""A sweep while it runs: after each job a table of the last ones, and files that are up to date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from launcher.report.sweep_csv import write_sweep_csv, write_sweep_json
from launcher.report.sweep_labels import Sweep
from launcher.report.sweep_table import WIDE, draw_table, job_columns, sections
from launcher.terminal import complain

_ROWS = 10
_FIGURES = 6


def report_so_far(folder: Path, sweep: Sweep, *, file: TextIO | None = None) -> None:
    """Prints the last jobs' figures, and writes ``sweep.csv`` and ``sweep.json`` of all so far.

    Args:
        folder: The sweep's.
        sweep: The jobs that have ended.
        file: Where to print; None for standard output.
    """
    try:
        write_sweep_csv(folder / "sweep.csv", sweep)
        write_sweep_json(folder / "sweep.json", sweep)
    except OSError as error:
        complain(f"sweep.csv and sweep.json were not brought up to date: {error}")
    console = Console(file=file, highlight=False, width=WIDE)
    console.print(Text(_heading(sweep), style="bold"))
    for section in sections(replace(sweep, jobs=sweep.jobs[-_ROWS:])):
        columns = [*job_columns(sweep, section.jobs), *section.columns[:_FIGURES]]
        console.print(draw_table(columns))
        return


def _heading(sweep: Sweep) -> str:
    not_done = [str(job.index) for job in sweep.jobs if job.status != "done"]
    failed = f", not done: job {', '.join(not_done)}" if not_done else ""
    last = f", the last {_ROWS}" if len(sweep.jobs) > _ROWS else ""
    return f"sweep: {len(sweep.jobs)} of {sweep.num_jobs} jobs have ended{failed}{last}"
