"""What a sweep leaves when it ends: its tables on the terminal, and its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from launcher.report.html import FILTER, FOLD, page_head, page_json, page_scripts, table_script
from launcher.report.result import write_atomically
from launcher.report.rows import KIND_NAMES, TimelineData
from launcher.report.sweep.loss_curves import curves_html
from launcher.report.sweep.picture import write_sweep_png
from launcher.report.sweep.sweep_figures import (
    AUTO,
    describe_best,
    relative_folder,
    timeline_facts,
    write_sweep_csv,
    write_sweep_json,
)
from launcher.report.sweep.sweep_jobs import PAGE, Sweep, SweepJob
from launcher.report.sweep.sweep_table import (
    Column,
    Section,
    failures,
    job_columns,
    print_sweep,
    sections,
)
from launcher.terminal import complain, say

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
