"""timeline.html: one file that shows timelines interactively, without network or libraries.

The figures are plain HTML; the bars travel as JSON in the page and are drawn on a canvas by
scripts that know nothing of programs: rows, bars, and the name of what each bar waited for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from html import escape
from importlib.resources import files
from pathlib import Path

from launcher.report.result import write_atomically
from launcher.report.rows import KIND_NAMES, TimelineData, timeline_data
from launcher.report.summary import MEASURED_MEMORY, format_duration, format_percent
from strategies.analysis.memory import RankMemory, peak_activations
from strategies.analysis.metrics import Metrics
from strategies.analysis.timeline import Timeline
from strategies.ir.kinds import KINDS
from strategies.ir.versions import staleness, weight_versions

_SCRIPTS = ("timeline.js", "fold.js", "timeline_input.js")
_HELP = (
    "wheel: zoom, drag: pan, click a bar: follow its microbatch; keys: + - arrows, "
    "0 or Home: whole step, m: memory over time, Esc: unselect; the wheel over the rank names "
    "scrolls the page"
)
# Of what fold.js and timeline_input.js do on a click; the page of a sweep has the first only.
FOLD = '<button id="memory" type="button">hide memory over time</button>'
_VIEW = (
    f'<div class="view">{FOLD}<button id="closer" type="button">zoom in</button>'
    '<button id="farther" type="button">zoom out</button>'
    f'<button id="whole" type="button">whole step</button><p class="help">{_HELP}</p></div>'
)
# Above tables that table.js sorts and filters.
FILTER = (
    '<div class="view"><input id="filter" type="search" size="32" aria-label="filter" '
    'placeholder="filter, e.g. pp=4 bubble&lt;20"><span id="shown" role="status"></span>'
    '<p class="help">Rows that have all words; name=value, name&lt;value and name&gt;value ask one '
    "column. A click on a heading sorts by it, another one the other way round.</p></div>"
)
_MOST_OPEN = 8  # ranks whose memory is shown before anybody asks for it


@dataclass(frozen=True)
class Panel:
    """One timeline of a page or a trace.

    Attributes:
        label: Its heading, ``predicted`` or ``measured`` for instance.
        metrics: Adds the bound to the figures; the rest is read off the timeline.
        memory: Per rank, at its worst moment; adds a bar each. None or () where it is unknown.
        memory_limit: Bytes that a rank has; None for a prediction without a machine.
        measured_memory: Per rank, the peak in bytes that a run has had; () where it is unknown.
        memory_kind: What that is, as in result.json.
    """

    label: str
    timeline: Timeline
    metrics: Metrics | None = None
    memory: tuple[RankMemory, ...] | None = None
    memory_limit: float | None = None
    measured_memory: tuple[int, ...] = ()
    memory_kind: str | None = None

    @cached_property
    def data(self) -> TimelineData:
        return timeline_data(self.label, self.timeline)


def write_timeline_html(
    path: Path, panels: Sequence[Panel], *, title: str, table: str = ""
) -> None:
    write_atomically(path, timeline_html(panels, title=title, table=table))


def timeline_html(panels: Sequence[Panel], *, title: str, table: str = "") -> str:
    """The page: panels one under the other.

    Panels with the same time unit share one axis; with different units each unit has its own axis
    over the full width, and zooming keeps them aligned.

    ``table``: HTML of a section above them, with a table that can be sorted and filtered.
    """
    payload = {"kinds": KIND_NAMES, "panels": [panel.data.panel for panel in panels]}
    data = page_json(payload)
    sections = "".join(_section(index, panel) for index, panel in enumerate(panels))
    styles = ("timeline.css", "table.css") if table else ("timeline.css",)
    return (
        page_head(title, styles) + f'<header><h1>{escape(title)}</h1><div id="legend"></div>{_VIEW}'
        f"</header>\n<main>\n{table}{sections}</main>\n{page_scripts(data, _SCRIPTS)}"
        + (table_script() if table else "")
        + "</body>\n</html>\n"
    )


def _section(index: int, panel: Panel) -> str:
    figures = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in _figure_items(panel)
    )
    memory = memory_html(panel.memory, limit_bytes=panel.memory_limit) if panel.memory else ""
    if panel.measured_memory:
        memory = _measured_html(panel.measured_memory, panel.memory_kind)
    return (
        f'<section><h2>{escape(panel.label)}</h2><dl class="figures">{figures}</dl>'
        f'<canvas class="timeline" id="panel{index}" role="img" '
        f'aria-label="{escape(panel.label)}: timeline of every rank"></canvas>'
        f"{memory}</section>\n"
    )


def page_head(title: str, styles: Sequence[str]) -> str:
    style = "".join(map(_asset, styles))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
    )


def page_json(value: object) -> str:
    # "<" must not occur: "</script>" would end the element, whatever the JSON says.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def page_scripts(data: str, names: Sequence[str]) -> str:
    """The end of a page: its data as JSON, and scripts of ``assets`` that draw them."""
    return (
        '<div id="tip" role="tooltip" hidden></div>\n'
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{page_script(names)}</script>\n"
    )


def table_script() -> str:
    """What sorts and filters the tables of a page, in a scope of its own."""
    return f"<script>\n(() => {{\n{_asset('table.js')}}})();\n</script>\n"


def page_script(names: Sequence[str]) -> str:
    """Scripts behind what the table of kinds tells them."""
    words, numbers, colours = {}, {}, {}
    for kind, facts in KINDS.items():
        if facts.occupies != "wire":
            words[kind.value] = facts.word
            numbers[kind.value] = facts.number
            colours[kind.value] = facts.colour
    told = [_constant("WORDS", words), _constant("NUMBERS", numbers), _constant("COLOURS", colours)]
    # A directive counts only as the very first statement.
    return "\n".join(['"use strict";', *told, *map(_asset, names)])


def _constant(name: str, values: Mapping[str, object]) -> str:
    lines = "".join(f"  {key}: {json.dumps(value)},\n" for key, value in values.items())
    return f"const {name} = {{\n{lines}}};"


def _asset(name: str) -> str:
    return files("launcher.report").joinpath("assets", name).read_text(encoding="ascii")


def _figure_items(panel: Panel) -> Iterator[tuple[str, str]]:
    timeline, metrics = panel.timeline, panel.metrics
    unit = timeline.time_unit
    whole = "makespan"
    if timeline.program.updates is not None:
        whole = f"{timeline.program.steps:g} batches, filled and drained"
    yield whole, format_duration(timeline.makespan, unit)
    yield "period", format_duration(timeline.period, unit)
    yield "bubble ratio", format_percent(timeline.bubble_ratio)
    if metrics is not None and metrics.time_unit == unit:
        bound = format_duration(metrics.lower_bound, unit)
        yield "lower bound", f"{bound} ({metrics.binding_bound})"
        yield "LB1, time", f"{format_duration(metrics.lb1, unit)} (rank {metrics.lb1_rank})"
        yield "LB2, memory", f"{format_duration(metrics.lb2, unit)} (rank {metrics.lb2_rank})"
        took = timeline.makespan if metrics.synchronous else timeline.period
        yield "above the bound", format_percent(took / metrics.lower_bound - 1.0)
    yield "exposed reduction", format_duration(timeline.exposed_grad_reduce, unit)
    peaks = peak_activations(timeline.program) if metrics is None else metrics.peak_activations
    yield "peak activations", f"{max(peaks):.4g} microbatches (rank {peaks.index(max(peaks))})"
    if timeline.program.updates is not None:
        late = " ".join(map(str, staleness(timeline.program)))
        yield "updates late, per stage", late
        yield "versions, per rank", " ".join(map(str, weight_versions(timeline.program)))
    if metrics is not None:
        known = [value for value in metrics.peak_memory_bytes if value is not None]
        if known:
            rank = metrics.peak_memory_bytes.index(max(known))
            yield "predicted peak memory", f"{max(known) / 2**30:.4g} GiB (rank {rank})"


# What each rank holds at its worst moment, by what it is for: as text, JSON and bars.

_NAMES = tuple(entry.name for entry in fields(RankMemory))
# Okabe and Ito's colours, which colour-blind people can tell apart; a grey for the least.
_COLOURS = dict(
    zip(
        _NAMES,
        (
            "#0072b2", "#56b4e9", "#009e73", "#f0e442",
            "#e69f00", "#d55e00", "#cc79a7", "#999999",
        ),
        strict=True,
    )
)  # fmt: skip


_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_VISIBLE = 20  # A bar shorter than this part of its axis shows nothing of its parts.


def memory_mapping(ranks: Sequence[RankMemory]) -> list[dict[str, int]]:
    """Per rank the bytes by what they are for, and their sum, as result.json has them."""
    return [
        {**{name: getattr(held, name) for name in _NAMES}, "total": held.total} for held in ranks
    ]


def memory_line(held: RankMemory) -> str:
    """One rank in a line: the total, then everything that it has, largest first.

    >>> memory_line(RankMemory(parameters=2**30, activations=3 * 2**30))
    '4 GiB (activations 3, parameters 1)'
    """
    present = sorted((name for name in _NAMES if getattr(held, name)), key=_NAMES.index)
    present.sort(key=lambda name: -getattr(held, name))
    parts = ", ".join(f"{_word(name)} {getattr(held, name) / 2**30:.3g}" for name in present)
    return f"{held.total / 2**30:.4g} GiB" + (f" ({parts})" if parts else "")


def memory_html(ranks: Sequence[RankMemory], *, limit_bytes: float | None = None) -> str:
    """A bar per rank, all on one scale; a mark where the machine's memory ends, if it is known."""
    largest = max(1.0, *(float(held.total) for held in ranks))
    scale, note = max(largest, limit_bytes or 0.0), ""
    if limit_bytes is not None and largest * _VISIBLE < limit_bytes:
        # On the limit's axis nothing would be seen of them.
        note = (
            f"<p>the axis ends at {_size(largest)}; the limit of "
            f"{limit_bytes / 2**30:.4g} GiB is {limit_bytes / largest:.0f} times as far</p>"
        )
        scale, limit_bytes = largest, None
    shown = [name for name in _NAMES if any(getattr(held, name) for held in ranks)]
    keys = "".join(
        f'<span><i style="background:{_COLOURS[name]}"></i>{escape(_word(name))}</span>'
        for name in shown
    )
    rows = "".join(_memory_bar(rank, held, scale, limit_bytes) for rank, held in enumerate(ranks))
    return _folded("predicted memory at the peak", f"<p>{keys}</p>{note}{rows}", len(ranks))


def _folded(title: str, content: str, num_ranks: int) -> str:
    """A heading that opens what belongs to it; of few ranks that is open."""
    shown = " open" if num_ranks <= _MOST_OPEN else ""
    of = "" if shown else f" of {num_ranks} ranks"
    return f'<details class="memory"{shown}><summary>{title}{of}</summary>{content}</details>'


def _measured_html(peaks: Sequence[int], kind: str | None) -> str:
    """A bar per rank, without parts: of those only the prediction knows."""
    what = MEASURED_MEMORY.get(str(kind))
    largest = max(1, *peaks)
    rows = "".join(
        f'<div class="row"><span>rank {rank}</span><div class="bar">'
        f'<i style="width:{100 * peak / largest:.3f}%;background:{_COLOURS[_NAMES[-1]]}"></i></div>'
        f"<span>{_size(peak)}</span></div>"
        for rank, peak in enumerate(peaks)
    )
    note = "" if what is None else f"<p>{escape(what)} of each rank's process</p>"
    return _folded("measured memory at the peak", f"{note}{rows}", len(peaks))


def _memory_bar(rank: int, held: RankMemory, scale: float, limit: float | None) -> str:
    parts = "".join(
        f'<i style="width:{100 * getattr(held, name) / scale:.3f}%;background:{_COLOURS[name]}" '
        f'title="{escape(_word(name))}: {_size(getattr(held, name))}"></i>'
        for name in _NAMES
        if getattr(held, name)
    )
    mark = "" if limit is None else f'<b style="left:{100 * limit / scale:.3f}%"></b>'
    total = _size(held.total)
    return (
        f'<div class="row"><span>rank {rank}</span><div class="bar" role="img" '
        f'aria-label="{escape(memory_line(held))}">{parts}{mark}</div><span>{total}</span></div>'
    )


def _size(num_bytes: float) -> str:
    """``1.5 GiB``, ``293 KiB``: never a page of zeros."""
    unit, name = next((u for u in _UNITS if num_bytes >= u[0] / 10), _UNITS[-1])
    return f"{num_bytes / unit:.4g} {name}"


def _word(name: str) -> str:
    return name.replace("_", " ")
