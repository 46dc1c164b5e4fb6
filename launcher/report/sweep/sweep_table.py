"""The jobs of a sweep as tables: what the terminal and the page show, the best values marked."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.config.key import shorten
from launcher.report.sweep.sweep_figures import (
    FIGURES,
    PREDICTED,
    Figure,
    best_jobs,
    by_time_unit,
    measured_figures,
    write_column,
)
from launcher.report.sweep.sweep_jobs import Sweep, SweepJob, override_values
from strategies.errors import readable

BEST = "*"
_MAX_ERROR = 160
_MOST_CELL = 60  # of a value as it was typed; sweep.csv has all of it
WIDE = 1_000


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        heading: A line break stands where it may be broken.
        unit: Of all its cells, empty where there is none.
        cells: A text per job, empty where a job has no such figure.
        best: Whether a cell is to be marked.
    """

    heading: str
    unit: str
    cells: tuple[str, ...]
    best: tuple[bool, ...]
    text: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Columns that belong together, over jobs with one time unit."""

    title: str
    jobs: tuple[SweepJob, ...]
    columns: tuple[Column, ...]


def sections(sweep: Sweep) -> Iterator[Section]:
    """Measured figures beside their predictions, then all that was predicted, per time unit."""
    for unit, jobs in by_time_unit(sweep.jobs):
        found = 0
        for title, figures in (
            ("measured beside predicted", measured_figures(jobs)),
            ("one step, predicted", PREDICTED),
        ):
            columns = tuple(_columns(figures, jobs, unit))
            if columns:
                found += 1
                yield Section(title, jobs, columns)
        if not found:
            yield Section("no figures", jobs, ())


def job_columns(sweep: Sweep, jobs: Sequence[SweepJob]) -> Iterator[Column]:
    """What stands left of the figures: number, varied overrides, and how jobs ended if not well."""
    none = (False,) * len(jobs)
    yield Column("job", "", tuple(str(job.index) for job in jobs), none)
    if not sweep.varied:
        yield Column(
            "schedule", "", tuple(str(j.result.get("schedule", "")) for j in jobs), none, True
        )
    for key in sweep.varied:
        cells = tuple(override_values(job.overrides).get(key, "") for job in jobs)
        yield Column(key, "", cells, none, text=True)
    if any(job.result.get("synchronous") is False for job in jobs):
        words: dict[object, str] = {True: "yes", False: "no"}
        flushes = tuple(words.get(job.result.get("synchronous"), "") for job in jobs)
        yield Column("flush", "", flushes, none, text=True)
    if any(job.status != "done" for job in jobs):
        yield Column("status", "", tuple(job.status for job in jobs), none, text=True)


def failures(sweep: Sweep) -> Iterator[str]:
    """A line per job that is not done."""
    for job in sweep.jobs:
        if job.status != "done":
            code = "" if job.exit_code is None else f" (exit {job.exit_code})"
            lines = job.error.strip().splitlines()
            error = lines[0] if lines else ""
            if len(error) > _MAX_ERROR:
                error = error[: _MAX_ERROR - 3] + "..."
            yield f"job {job.index} {job.status}{code}" + (f": {error}" if error else "")
    missing = sweep.num_jobs - len(sweep.jobs)
    if missing:
        yield f"{missing} of {sweep.num_jobs} jobs {sweep.missing}"


# What one line says of a job that has ended: the first three of these that it has.
_LINE = ("loss_last", "val_loss", "step_time_s", "makespan", "measured_bubble_ratio",
         "bubble_ratio", "peak_activations_max")  # fmt: skip
_MOST_FIGURES = 3


def job_line(sweep: Sweep, job: SweepJob, took_s: float) -> str:
    """``schedule=zb_v pp=2  last loss 2.8926, step time 81.2 ms; 21 s``."""
    figures: list[str] = []
    for name in _LINE:
        value = FIGURES[name].value(job)
        if value is not None and len(figures) < _MOST_FIGURES:
            unit, (cell,) = write_column([value], FIGURES[name].quantity, job.time_unit)
            heading = FIGURES[name].heading.replace("\n", " ")
            figures.append(f"{heading} {cell} {unit}".rstrip())
    status = "" if job.status == "done" else f"{job.status}  "
    said = f"{status}{', '.join(figures)}"
    return f"{sweep.label(job)}  {said + '; ' if said else ''}{took_s:.0f} s"


def print_sweep(sweep: Sweep, *, file: TextIO | None = None) -> None:
    """Prints the tables; jobs in the order of running, the best value of a column with a star."""
    # Rich takes 80 columns for whatever is no terminal; and it cuts cells where a table is too
    # wide, which then is better left to the terminal to wrap.
    probe = Console(file=file, highlight=False)
    room = probe.width if probe.is_terminal else WIDE
    console = Console(file=file, highlight=False, width=WIDE)
    marked = False
    for section in sections(sweep):
        left = list(job_columns(sweep, section.jobs))
        table = draw_table([*left, *section.columns])
        same: list[Column] = []
        if console.measure(table).maximum > room and len(section.jobs) > 1:
            # What is equal everywhere makes room for what is not.
            same = [column for column in section.columns if len(set(column.cells)) == 1]
            table = draw_table([*left, *(c for c in section.columns if c not in same)])
        shown = [column for column in section.columns if column not in same]
        left_out: list[Column] = []
        while len(shown) > 1 and console.measure(table).maximum > room:
            left_out.insert(0, shown.pop())
            table = draw_table([*left, *shown])
        console.print(Text(section.title, style="bold"))
        console.print(table)
        if left_out:
            names = ", ".join(column.heading.replace("\n", " ") for column in left_out)
            console.print(Text(textwrap.fill(f"in sweep.html and sweep.csv: {names}", room)))
        if same:
            words = "the same for all: " + ", ".join(map(_in_words, same))
            console.print(Text(textwrap.fill(words, room)))
        marked |= any(any(column.best) for column in section.columns)
    if marked:
        console.print(Text(f"{BEST} best of its column"))
    for line in failures(sweep):
        console.print(Text(readable(line)), soft_wrap=True)


def _columns(
    figures: Sequence[Figure], jobs: Sequence[SweepJob], unit: str | None
) -> Iterator[Column]:
    for figure in figures:
        values = [figure.value(job) for job in jobs]
        if all(value is None for value in values):
            continue
        written, cells = write_column(values, figure.quantity, unit)
        best = best_jobs(figure, jobs)
        yield Column(figure.heading, written, tuple(cells), tuple(j.index in best for j in jobs))


def _in_words(column: Column) -> str:
    return f"{column.heading} {column.cells[0]} {column.unit}".replace("\n", " ").rstrip()


def draw_table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        lines = column.heading.split("\n")
        if column.unit:
            lines[-1] += f" {column.unit}"
        heading = Text("\n".join(lines)) if column.text else Text("\n".join(f"{x} " for x in lines))
        table.add_column(
            heading, justify="left" if column.text else "right", no_wrap=True, vertical="bottom"
        )
    for row in zip(*(_marked(column) for column in columns), strict=True):
        table.add_row(*row)
    return table


def _marked(column: Column) -> Iterator[Text]:
    """The cells; a star or a blank behind each number keeps the digits aligned."""
    for cell, best in zip(column.cells, column.best, strict=True):
        if column.text:
            yield Text(shorten(readable(cell.replace("\n", " ")), _MOST_CELL))
        else:
            yield Text(cell + (BEST if best else " "), style="bold" if best else "")
