"""What a sweep leaves when it ends: its tables on the terminal, and its files."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.config.key import shorten
from launcher.report.html import FILTER, FOLD, page_head, page_json, page_scripts, table_script
from launcher.report.result import write_atomically
from launcher.report.rows import KIND_NAMES, TimelineData
from launcher.report.sweep.loss_curves import curves_html
from launcher.report.sweep.picture import write_sweep_png
from launcher.report.sweep.sweep_figures import (
    AUTO,
    FIGURES,
    PREDICTED,
    Figure,
    best_jobs,
    by_time_unit,
    describe_best,
    measured_figures,
    relative_folder,
    timeline_facts,
    write_column,
    write_sweep_csv,
    write_sweep_json,
)
from launcher.report.sweep.sweep_jobs import PAGE, Sweep, SweepJob, override_values
from launcher.terminal import complain, say
from strategies.errors import readable

# --------------------------------------------------------------------------------------------------
# The jobs of a sweep as tables: what the terminal and the page show, the best values marked.

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


# --------------------------------------------------------------------------------------------------
_SCRIPTS = ("timeline.js", "fold.js", "timeline_input.js")
_STYLES = ("timeline.css", "table.css")
_HELP = (
    "Timelines in one unit share one time scale. Wheel: zoom, drag: pan, click a bar: follow its "
    "microbatch; keys: + - arrows, 0 or Home: everything, Esc: unselect; the wheel over the rank "
    "names scrolls the page"
)
_VIEW = f'<div id="legend"></div><div class="view">{FOLD}<p class="help">{_HELP}</p></div>\n'
# A page beyond this takes a browser too long to open; the jobs' own pages have the rest.
_MAX_CHARACTERS = 30_000_000


def report_sweep(folder: Path, sweep: Sweep, *, metric: str = AUTO, hurry: bool = False) -> None:
    """Prints the tables and writes ``sweep.csv``, ``.json``, ``.html`` and ``.png``.

    A file that cannot be written is named on standard error and changes nothing else: the jobs
    have run, and their exit codes are what the sweep says.

    ``metric``: by which the best job is named, see ``launcher.report.sweep.sweep_figures``.
    ``hurry``: whether somebody waits for the end; the ``.png`` takes longest and is left out.
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
    first = sweep.jobs[0].overrides if sweep.jobs else ()
    keys = sweep.varied
    return " ".join(word for word in first if word.lstrip("+").partition("=")[0] not in keys)


def report_so_far(folder: Path, sweep: Sweep) -> None:
    """Writes ``sweep.csv`` and ``sweep.json`` of the jobs that have ended so far."""
    try:
        write_sweep_csv(folder / "sweep.csv", sweep)
        write_sweep_json(folder / "sweep.json", sweep)
    except OSError as error:
        complain(f"sweep.csv and sweep.json were not brought up to date: {error}")


# sweep.html: the table of a sweep and all of its timelines on one time scale, in one file. The
# timelines are those of the jobs' own pages, drawn by the same scripts.


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A timeline that found room on the page: its number and its JSON."""

    number: int
    timeline: TimelineData
    data: str


def write_sweep_html(path: Path, sweep: Sweep, *, title: str) -> None:
    write_atomically(path, sweep_html(sweep, title=title, folder=path.parent))


def sweep_html(sweep: Sweep, *, title: str, folder: Path) -> str:
    """The page.

    ``folder``: where it will lie; links to the jobs' own pages start there.
    """
    drawn = _drawn(sweep)
    left_out = sum(len(job.timelines) for job in sweep.jobs) - sum(map(len, drawn.values()))
    notes = list(failures(sweep))
    if left_out:
        notes.append(
            f"timelines left out here, because the page would be too large to open: {left_out}; "
            "each job's own page has them"
        )
    tables = "".join(_table(sweep, section, drawn) for section in sections(sweep))
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    figures = "".join(
        _figure(sweep, job, drawn[job.index], folder) for job in sweep.jobs if drawn[job.index]
    )
    return (
        page_head(title, _STYLES)
        + f"<header><h1>{escape(title)}</h1>{FILTER}</header>\n<main>\n{tables}"
        + (f'<ul class="notes">{listed}</ul>\n' if notes else "")
        + curves_html(sweep.curves)
        + (_VIEW + figures if figures else "")
        + "</main>\n"
        + (_scripts(drawn) if figures else "")
        + table_script()
        + "</body>\n</html>\n"
    )


def _drawn(sweep: Sweep) -> dict[int, list[_Drawn]]:
    """The timelines per job, as many as fit; only whole jobs are left out."""
    room, number = _MAX_CHARACTERS, 0
    found: dict[int, list[_Drawn]] = {}
    for job in sweep.jobs:
        found[job.index] = []
        texts = [page_json(timeline.panel) for timeline in job.timelines]
        room -= sum(map(len, texts))
        if room < 0:
            continue
        for timeline, text in zip(job.timelines, texts, strict=True):
            found[job.index].append(_Drawn(number, timeline, text))
            number += 1
    return found


def _scripts(drawn: dict[int, list[_Drawn]]) -> str:
    panels = [panel for job in drawn.values() for panel in job]
    data = f'{{"kinds":{json.dumps(KIND_NAMES)},"panels":[{",".join(p.data for p in panels)}]}}'
    return page_scripts(data, _SCRIPTS)


def _table(sweep: Sweep, section: Section, drawn: dict[int, list[_Drawn]]) -> str:
    columns = [*job_columns(sweep, section.jobs), *section.columns]
    heads = "".join(
        f'<th scope="col"{_class(text=column.text)}>{_heading(column)}</th>' for column in columns
    )
    rows = ""
    for number, job in enumerate(section.jobs):
        cells = ""
        for position, column in enumerate(columns):
            text = escape(column.cells[number])
            if position == 0 and drawn[job.index]:
                text = f'<a href="#job{job.index}">{text}</a>'
            cells += f"<td{_class(text=column.text, best=column.best[number])}>{text}</td>"
        failed = _class(failed=job.status != "done")
        rows += f'<tr data-job="{job.index}"{failed}>{cells}</tr>\n'
    return (
        f'<section class="table"><h2>{escape(section.title)}</h2>\n'
        f"<table><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody></table></section>\n"
    )


def _heading(column: Column) -> str:
    words = escape(column.heading).replace("\n", " ")
    return words + (f" <small>{escape(column.unit)}</small>" if column.unit else "")


def _class(**flags: bool) -> str:
    names = " ".join(name for name, given in flags.items() if given)
    return f' class="{names}"' if names else ""


def _figure(sweep: Sweep, job: SweepJob, drawn: list[_Drawn], folder: Path) -> str:
    label = escape(sweep.label(job))
    link = quote(f"{relative_folder(job, folder)}/{PAGE}")
    if link.partition("/")[0].find(":") >= 0:
        link = f"./{link}"  # else a folder "a:b" would be read as a scheme
    alone = len(drawn) == 1
    panels = "".join(
        ("" if alone else f"<h3>{escape(panel.timeline.label)}{_facts(job, panel)}</h3>")
        + f'<canvas class="timeline" id="panel{panel.number}" role="img" '
        f'aria-label="{label}, {escape(panel.timeline.label)}: timeline of every rank"></canvas>\n'
        for panel in drawn
    )
    status = "" if job.status == "done" else f' <span class="failed">{escape(job.status)}</span>'
    return (
        f'<section id="job{job.index}"><h2>{label}{status}{_facts(job, drawn[0]) if alone else ""}'
        f'<a class="own" href="{link}">own page</a></h2>\n{panels}</section>\n'
    )


def _facts(job: SweepJob, panel: _Drawn) -> str:
    return f' <span class="facts">{escape(timeline_facts(job, panel.timeline))}</span>'
