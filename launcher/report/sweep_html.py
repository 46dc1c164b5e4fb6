"""sweep.html: the table of a sweep and all of its timelines on one time scale, in one file.

The timelines are those of the jobs' own pages, drawn by the same scripts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from launcher.report.atomic import write_atomically
from launcher.report.sweep_csv import relative_folder
from launcher.report.sweep_job import PICTURE, JobTimeline, SweepJob
from launcher.report.sweep_labels import Sweep
from launcher.report.sweep_panels import timeline_facts
from launcher.report.sweep_table import Column, Section, failures, job_columns, sections

_SCRIPTS = ("timeline.js", "sweep.js", "timeline_input.js")
_STYLES = ("timeline.css", "sweep.css")
_HELP = (
    "Timelines in one unit share one time scale. Wheel: zoom, drag: pan, click a bar: follow its "
    "microbatch; keys: + - arrows, 0 or Home: everything, Esc: unselect; the wheel over the rank "
    "names scrolls the page"
)
_VIEW = (
    f'<div id="legend"></div><div class="view"><p class="help">{_HELP}</p>'
    '<button id="memory" type="button"></button></div>\n'
)
# A page beyond this takes a browser too long to open; the jobs' own pages have the rest.
_MAX_CHARACTERS = 30_000_000


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A timeline that found room on the page: its number and its JSON."""

    number: int
    timeline: JobTimeline
    data: str


def write_sweep_html(path: Path, sweep: Sweep, *, title: str) -> None:
    """Writes ``sweep.html``."""
    write_atomically(path, sweep_html(sweep, title=title, folder=path.parent))


def sweep_html(sweep: Sweep, *, title: str, folder: Path) -> str:
    """The page.

    Args:
        sweep: The jobs that have ended.
        title: Its heading.
        folder: Where it will lie; links to the jobs' own pages start there.
    """
    drawn = _drawn(sweep)
    left_out = sum(len(job.timelines) for job in sweep.jobs) - sum(map(len, drawn.values()))
    notes = list(failures(sweep))
    if left_out:
        notes.append(
            f"timelines left out here, because the page would be too large to open: {left_out}; "
            "each job's own page has them"
        )
    assets = files("launcher.report")
    style = "".join(assets.joinpath(name).read_text(encoding="ascii") for name in _STYLES)
    tables = "".join(_table(sweep, section, drawn) for section in sections(sweep))
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    figures = "".join(
        _figure(sweep, job, drawn[job.index], folder) for job in sweep.jobs if drawn[job.index]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1></header>\n<main>\n{tables}"
        + (f'<ul class="notes">{listed}</ul>\n' if notes else "")
        + (_VIEW + figures if figures else "")
        + "</main>\n"
        + (_scripts(drawn) if figures else "")
        + "</body>\n</html>\n"
    )


def _drawn(sweep: Sweep) -> dict[int, list[_Drawn]]:
    """The timelines per job, as many as fit; only whole jobs are left out."""
    room, number = _MAX_CHARACTERS, 0
    found: dict[int, list[_Drawn]] = {}
    for job in sweep.jobs:
        found[job.index] = []
        # "<" must not occur: "</script>" would end the element, whatever the JSON says.
        texts = [
            json.dumps(timeline.panel, separators=(",", ":")).replace("<", "\\u003c")
            for timeline in job.timelines
        ]
        room -= sum(map(len, texts))
        if room < 0:
            continue
        for timeline, text in zip(job.timelines, texts, strict=True):
            found[job.index].append(_Drawn(number, timeline, text))
            number += 1
    return found


def _scripts(drawn: dict[int, list[_Drawn]]) -> str:
    panels = [panel for job in drawn.values() for panel in job]
    # One process has written them all, so a kind has the same number in each.
    (kinds,) = {panel.timeline.kinds for panel in panels}
    data = f'{{"kinds":{json.dumps(kinds)},"panels":[{",".join(p.data for p in panels)}]}}'
    assets = files("launcher.report")
    script = "\n".join(assets.joinpath(name).read_text(encoding="ascii") for name in _SCRIPTS)
    return (
        '<div id="tip" role="tooltip" hidden></div>\n'
        f'<script type="application/json" id="data">{data}</script>\n<script>\n{script}</script>\n'
    )


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
        rows += f"<tr{_class(failed=job.status != 'done')}>{cells}</tr>\n"
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
    link = quote(f"{relative_folder(job, folder)}/{PICTURE}")
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
