"""sweep.html: the table of a sweep and all of its timelines on one time scale, in one file.

The timelines are those of the jobs' own pages, drawn by the same scripts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launcher.report.html import page_script
from launcher.report.result import write_atomically
from launcher.report.summary import format_duration, format_percent
from launcher.report.sweep.sweep_figures import FIGURES, relative_folder
from launcher.report.sweep.sweep_jobs import PICTURE, JobTimeline, Sweep, SweepJob
from launcher.report.sweep.sweep_table import Column, Section, failures, job_columns, sections

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
    assets = files("launcher.report").joinpath("assets")
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
    return (
        '<div id="tip" role="tooltip" hidden></div>\n'
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{page_script(_SCRIPTS)}</script>\n"
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


# ------------------------------------------------------------------------------------ sweep panels
#
# The timelines of a sweep as bars with a place: what a picture of all of them needs to know.


_COMPUTE_SHARE = 0.66  # of a rank's row, where its collectives have a line of their own


@dataclass(frozen=True, slots=True)
class Bar:
    """One instruction.

    Attributes:
        rank: Whose row.
        top: Upper border in that row, 0 to 1.
        bottom: Lower border.
        kind: Name of its kind.
        stage: Global stage index.
        number: Its microbatch or bucket, -1 for neither.
        start: In the panel's unit.
        end: In the panel's unit.
    """

    rank: int
    top: float
    bottom: float
    kind: str
    stage: int
    number: int
    start: float
    end: float

    @property
    def short_text(self) -> str:
        """Its number alone: what the row and the colour do not say."""
        return str(self.stage if self.number < 0 else self.number)

    @property
    def text(self) -> str:
        """What is written upon it where there is room."""
        number = "" if self.number < 0 else str(self.number)
        # A fused pair names its forward.
        return (
            f"{self.stage}F{number}+B"
            if "_" in self.kind
            else f"{self.stage}{self.kind[0]}{number}"
        )


@dataclass(frozen=True, slots=True)
class PicturePanel:
    """One timeline.

    Attributes:
        label: The job, and whether it is the measured one.
        facts: Its makespan, bubble and peak in words.
        unit: ``F`` or ``s``.
        makespan: Last end; the first start is 0.
        num_stages: All stages.
        num_ranks: Rows.
        bars: In no particular order.
    """

    label: str
    facts: str
    unit: str
    makespan: float
    num_stages: int
    num_ranks: int
    bars: tuple[Bar, ...]


def picture_panels(sweep: Sweep) -> tuple[PicturePanel, ...]:
    """All timelines in the order of running; those with one time unit stand together."""
    found = [_panel(sweep, job, timeline) for job in sweep.jobs for timeline in job.timelines]
    units = list(dict.fromkeys(panel.unit for panel in found))
    return tuple(sorted(found, key=lambda panel: units.index(panel.unit)))


def timeline_facts(job: SweepJob, timeline: JobTimeline) -> str:
    """The figures that explain a picture: makespan, bubble, peak."""
    unit, makespan = timeline.panel["unit"], timeline.panel["makespan"]
    assert isinstance(unit, str)
    assert isinstance(makespan, (int, float))
    facts = [f"makespan {format_duration(makespan, unit)}"]
    measured = timeline.label == "measured"
    bubble = FIGURES["measured_bubble_ratio" if measured else "bubble_ratio"].value(job)
    if bubble is not None:
        facts.append(f"bubble {format_percent(bubble)}")
    peak = FIGURES["peak_activations_max"].value(job)
    if peak is not None and not measured:
        facts.append(f"peak {peak:.4g} microbatch{'' if peak == 1 else 'es'}")
    return ", ".join(facts)


def _panel(sweep: Sweep, job: SweepJob, timeline: JobTimeline) -> PicturePanel:
    data: Any = timeline.panel
    label = sweep.label(job)
    if len(job.timelines) > 1:
        label += f", {timeline.label}"
    if job.status != "done":
        label += f" ({job.status})"
    return PicturePanel(
        label=label,
        facts=timeline_facts(job, timeline),
        unit=data["unit"],
        makespan=data["makespan"],
        num_stages=data["stages"],
        num_ranks=len(data["rows"]),
        bars=bars(timeline),
    )


def bars(timeline: JobTimeline) -> tuple[Bar, ...]:
    """All bars of a timeline, each in its rank's row."""
    data: Any = timeline.panel
    return tuple(_bars(data["rows"], timeline.kinds, channel=data["channel"]))


def _bars(rows: Sequence[Any], kinds: Sequence[str], *, channel: bool) -> Iterator[Bar]:
    border = _COMPUTE_SHARE if channel else 1.0
    for rank, row in enumerate(rows):
        for lanes, top, bottom in ((row["compute"], 0.0, border), (row["channel"], border, 1.0)):
            for lane, bars in enumerate(lanes):
                high = top + (bottom - top) * lane / len(lanes)
                low = top + (bottom - top) * (lane + 1) / len(lanes)
                for kind, stage, number, start, end, *_ in bars:
                    yield Bar(rank, high, low, kinds[kind], stage, number, start, end)
