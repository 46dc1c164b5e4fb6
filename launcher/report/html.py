"""timeline.html: one file that shows timelines interactively, without network or libraries.

The figures are plain HTML; the bars travel as JSON in the page and are drawn on a canvas by
scripts that know nothing of programs: rows, bars, and the name of what each bar waited for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from launcher.report.atomic import write_atomically
from launcher.report.held import held_over_time
from launcher.report.lanes import channel_lanes, compute_lanes, uses_channel
from launcher.report.memory_bars import memory_html
from launcher.report.units import format_duration, format_percent
from launcher.report.waits import Wait, waits
from launcher.report.zeroed import zeroed
from strategies.ir.instruction import Instruction, Kind
from strategies.memory import peak_activations
from strategies.memory_model import RankMemory
from strategies.metrics import Metrics
from strategies.timeline import Event, Timeline

_KINDS = tuple(kind.value for kind in Kind)
_SCRIPTS = ("timeline.js", "timeline_input.js")
_AXIS = {"F": "time in F (one rank's forward of one microbatch)", "s": "time"}
_HELP = (
    "wheel: zoom, drag: pan, click a bar: follow its microbatch; keys: + - arrows, "
    "0 or Home: whole step, Esc: unselect; the wheel over the rank names scrolls the page"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline of the page.

    Attributes:
        label: Its heading, ``predicted`` or ``measured`` for instance.
        timeline: What is drawn.
        metrics: Adds the bound to the figures; the rest is read off the timeline.
        memory: Per rank, at its worst moment; adds a bar each. None or () where it is unknown.
        memory_limit: Bytes that a rank has; None for a prediction without a machine.
    """

    label: str
    timeline: Timeline
    metrics: Metrics | None = None
    memory: tuple[RankMemory, ...] | None = None
    memory_limit: float | None = None


def write_timeline_html(path: Path, panels: Sequence[Panel], *, title: str) -> None:
    """Writes ``timeline.html``."""
    write_atomically(path, timeline_html(panels, title=title))


def timeline_html(panels: Sequence[Panel], *, title: str) -> str:
    """The page: panels one under the other.

    Panels with the same time unit share one axis; with different units each unit has its own axis
    over the full width, and zooming keeps them aligned.
    """
    assets = files("launcher.report")
    script = "\n".join(assets.joinpath(name).read_text(encoding="ascii") for name in _SCRIPTS)
    style = assets.joinpath("timeline.css").read_text(encoding="ascii")
    payload = {"kinds": _KINDS, "panels": [_payload(panel) for panel in panels]}
    # "<" must not occur: "</script>" would end the element, whatever the JSON says.
    data = json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    sections = "".join(
        f'<section><h2>{escape(panel.label)}</h2><dl class="figures">{_figures(panel)}</dl>'
        f'<canvas class="timeline" id="panel{index}" role="img" '
        f'aria-label="{escape(panel.label)}: timeline of every rank"></canvas>'
        f"{_memory(panel)}</section>\n"
        for index, panel in enumerate(panels)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1><div id="legend"></div><p class="help">{_HELP}</p>'
        f'</header>\n<main>\n{sections}</main>\n<div id="tip" role="tooltip" hidden></div>\n'
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _memory(panel: Panel) -> str:
    return memory_html(panel.memory, limit_bytes=panel.memory_limit) if panel.memory else ""


def _figures(panel: Panel) -> str:
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in _figure_items(panel)
    )


def _figure_items(panel: Panel) -> Iterator[tuple[str, str]]:
    timeline, metrics = panel.timeline, panel.metrics
    unit = timeline.time_unit
    yield "makespan", format_duration(timeline.makespan, unit)
    yield "period", format_duration(timeline.period, unit)
    yield "bubble ratio", format_percent(timeline.bubble_ratio)
    if metrics is not None and metrics.time_unit == unit:
        bound = format_duration(metrics.lower_bound, unit)
        yield "lower bound", f"{bound} ({metrics.binding_bound})"
        yield "LB1, time", f"{format_duration(metrics.lb1, unit)} (rank {metrics.lb1_rank})"
        yield "LB2, memory", f"{format_duration(metrics.lb2, unit)} (rank {metrics.lb2_rank})"
        yield "above the bound", format_percent(timeline.makespan / metrics.lower_bound - 1.0)
    yield "exposed reduction", format_duration(timeline.exposed_grad_reduce, unit)
    peaks = peak_activations(timeline.program) if metrics is None else metrics.peak_activations
    yield "peak activations", f"{max(peaks):.4g} microbatches (rank {peaks.index(max(peaks))})"
    if metrics is not None:
        known = [value for value in metrics.peak_memory_bytes if value is not None]
        if known:
            rank = metrics.peak_memory_bytes.index(max(known))
            yield "peak memory", f"{max(known) / 2**30:.4g} GiB (rank {rank})"


def _payload(panel: Panel) -> dict[str, object]:
    timeline = zeroed(panel.timeline)
    placement = timeline.program.placement
    return {
        "unit": timeline.time_unit,
        "axis": _AXIS[timeline.time_unit],
        "makespan": _short(timeline.makespan),
        "stages": placement.num_stages,
        "channel": uses_channel(timeline),
        "rows": list(_rows(timeline)),
    }


def _rows(timeline: Timeline) -> Iterator[dict[str, object]]:
    graph = timeline.program.graph
    waiting = waits(timeline)
    for rank in range(len(timeline.program.ranks)):
        own = range(graph.offsets[rank], graph.offsets[rank + 1])
        wait_of = {graph.nodes[node]: waiting.get(node) for node in own}

        def bars(
            lanes: tuple[tuple[Event, ...], ...], wait_of: dict[Instruction, Wait | None] = wait_of
        ) -> list[list[list[object]]]:
            return [[_bar(timeline, e, wait_of[e.instruction]) for e in lane] for lane in lanes]

        held = held_over_time(timeline, rank)
        yield {
            "compute": bars(compute_lanes(timeline, rank)),
            "channel": bars(channel_lanes(timeline, rank)),
            "held": [(_short(time), _short(value)) for time, value in held],
        }


def _bar(timeline: Timeline, event: Event, wait: Wait | None) -> list[object]:
    """[kind, stage, microbatch or bucket, start, end, waited for, its rank, how, since, pair].

    The pair of a fused instruction is its backward's [kind, stage, microbatch], else null.
    """
    item = event.instruction
    number = item.bucket if item.microbatch is None else item.microbatch
    where = [item.stage, -1 if number is None else number]
    span = [_short(event.start), _short(event.end)]
    waited: list[object] = ["", -1, "", 0.0]
    if wait is not None:
        graph = timeline.program.graph
        name = str(graph.nodes[wait.node]).partition("@")[0]
        waited = [name, graph.rank[wait.node], wait.how, _short(wait.since)]
    pair = None
    if item.halves:
        half = item.halves[1]
        pair = [_KINDS.index(half.kind.value), half.stage, half.microbatch]
    return [_KINDS.index(item.kind.value), *where, *span, *waited, pair]


def _short(value: float) -> float:
    """Seven digits: what a picture can show, at half the size."""
    return float(f"{value:.7g}")
