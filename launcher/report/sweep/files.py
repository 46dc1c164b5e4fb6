"""What a sweep leaves when it ends: its tables on the terminal, and its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from launcher.report.sweep.page import write_sweep_html
from launcher.report.sweep.picture import write_sweep_png
from launcher.report.sweep.sweep_figures import (
    AUTO,
    describe_best,
    write_sweep_csv,
    write_sweep_json,
)
from launcher.report.sweep.sweep_jobs import Sweep
from launcher.report.sweep.sweep_table import WIDE, draw_table, job_columns, print_sweep, sections
from launcher.terminal import complain, say


def report_sweep(folder: Path, sweep: Sweep, *, metric: str = AUTO, hurry: bool = False) -> None:
    """Prints the tables and writes ``sweep.csv``, ``.json``, ``.html`` and ``.png``.

    A file that cannot be written is named on standard error and changes nothing else: the jobs
    have run, and their exit codes are what the sweep says.

    Args:
        folder: The sweep's.
        sweep: What ran.
        metric: By which the best job is named, see ``launcher.report.sweep.sweep_figures``.
        hurry: Whether somebody waits for the end; the ``.png`` takes longest and is left out.
    """
    print_sweep(sweep)
    if (best := describe_best(sweep, metric)) is not None:
        say(best)
    title = _title(sweep)
    drawn = any(job.timelines for job in sweep.jobs) and not hurry

    def png(path: Path) -> None:
        missing = write_sweep_png(path, sweep, title=title)
        if missing:
            complain(f"{path.name} has no room for the last {missing} timelines; see sweep.html")

    writers: dict[str, Callable[[Path], None]] = {
        "sweep.csv": lambda path: write_sweep_csv(path, sweep),
        "sweep.json": lambda path: write_sweep_json(path, sweep),
        "sweep.html": lambda path: write_sweep_html(path, sweep, title=title),
        "sweep.png": png,
    }
    written = []
    for name, write in writers.items():
        path = folder / name
        try:
            if name == "sweep.png" and not drawn:
                path.unlink(missing_ok=True)  # of an earlier sweep in this folder
                continue
            write(path)
            written.append(name)
        except ImportError as error:
            complain(f"{name} was not written: {error}. Try pip install matplotlib.")
        except Exception as error:
            # Whatever goes wrong with a picture, hours of jobs must not end in its traceback.
            complain(f"{name} was not written: {type(error).__name__}: {error}")
    say(f"files: {folder}: {' '.join(written)}")


def _title(sweep: Sweep) -> str:
    jobs = f"{len(sweep.jobs)} job{'' if len(sweep.jobs) == 1 else 's'}"
    if len(sweep.jobs) < sweep.num_jobs:
        jobs = f"{len(sweep.jobs)} of {sweep.num_jobs} jobs"
    common = _common(sweep)
    return f"Sweep over {', '.join(sweep.varied) or 'one job'}: {jobs}" + (
        f" with {common}" if common else ""
    )


def _common(sweep: Sweep) -> str:
    """Overrides that all jobs share."""
    first = sweep.jobs[0].overrides if sweep.jobs else ()
    keys = sweep.varied
    return " ".join(word for word in first if word.lstrip("+").partition("=")[0] not in keys)


# -------------------------------------------------------------------------------------- sweep live
#
# A sweep while it runs: after each job a table of the last ones, and files that are up to date.


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
