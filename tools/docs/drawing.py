"""A timeline as SVG: for pages that are read without scripts, and for the README.

Bars, lanes and colours are those of every other picture of a run. Text has no colour of its own but
the reader's: light on dark where the page is dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from launcher.report.rows import KIND_NAMES, timeline_data
from launcher.report.sweep.picture import Rgb, bar_colour, text_colour
from strategies.analysis.memory import peak_activations
from strategies.analysis.timeline import Timeline
from strategies.ir.kinds import KINDS, Kind

# The picture is this wide; lengths are its pixels.
_WIDTH, _LEFT, _RIGHT = 1000, 52, 92
_ROW, _HEADING, _AXIS, _GAP, _LEGEND = 26, 26, 26, 10, 24
_COMPUTE_SHARE = 0.66
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#55555f}"
    ".t{font-weight:600;fill:#1c1c1e}.i{fill:#ededf1}.a{stroke:#d4d4da}.b{font-size:11px}"
    "@media(prefers-color-scheme:dark)"
    "{text{fill:#b4b4c0}.t{fill:#f2f2f7}.i{fill:#33343d}.a{stroke:#4a4b55}}"
)


def svg(panels: Sequence[tuple[str, Timeline]], *, title: str) -> str:
    """Timelines under each other on one time axis, with what each rank holds at most.

    Args:
        panels: Heading and timeline of each; one time unit.
        title: What is read out where the picture cannot be seen.
    """
    span = max(timeline.makespan for _, timeline in panels)
    scale = (_WIDTH - _LEFT - _RIGHT) / span
    parts: list[str] = []
    top = 0.0
    for heading, timeline in panels:
        parts.append(f'<text class="t" x="{_LEFT}" y="{_num(top + 17)}">{escape(heading)}</text>')
        parts.append(
            f'<text x="{_WIDTH}" y="{_num(top + 17)}" text-anchor="end">holds at most</text>'
        )
        parts += _panel(timeline, top + _HEADING, scale)
        top += _HEADING + len(timeline.program.ranks) * _ROW + _GAP
    parts += _axis(span, scale, top - _GAP + 2, panels[0][1].time_unit)
    top += _AXIS
    parts += _legend([timeline for _, timeline in panels], top)
    height = _num(top + _LEGEND)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(timeline: Timeline, top: float, scale: float) -> Iterator[str]:
    data = timeline_data("", timeline).panel
    rows, stages, makespan = data["rows"], data["stages"], data["makespan"]
    assert isinstance(rows, list) and isinstance(stages, int) and isinstance(makespan, float | int)
    peaks = peak_activations(timeline.program)
    share = _COMPUTE_SHARE if data["channel"] else 1.0
    for rank, (row, peak) in enumerate(zip(rows, peaks, strict=True)):
        y, tall = top + rank * _ROW, _ROW - 4
        middle = _num(y + tall / 2 + 4)
        yield f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">rank {rank}</text>'
        yield f'<text x="{_WIDTH}" y="{middle}" text-anchor="end">{peak:g}</text>'
        yield _rect("i", _LEFT, y, makespan * scale, tall)
        for lanes, low, high in ((row["compute"], 0.0, share), (row["channel"], share, 1.0)):
            for lane, bars in enumerate(lanes):
                size = (high - low) * tall / len(lanes)
                yield from _bars(bars, y + low * tall + lane * size, size, scale, stages)


def _bars(
    bars: Sequence[Sequence[object]], y: float, tall: float, scale: float, stages: int
) -> Iterator[str]:
    """One path per colour, then the numbers of microbatches, one element per colour of text."""
    shapes: dict[str, str] = {}
    texts: dict[str, list[str]] = {}
    for kind, stage, number, start, end, *_ in bars:
        assert isinstance(kind, int) and isinstance(stage, int) and isinstance(number, int)
        assert isinstance(start, float | int) and isinstance(end, float | int)
        colour = bar_colour(KIND_NAMES[kind], stage, stages)
        x, width = _LEFT + start * scale, (end - start) * scale
        fill = _hex(colour)
        shape = f"M{_num(x)} {_num(y)}h{_num(max(width - 0.8, 0.5))}v{_num(tall)}H{_num(x)}z"
        shapes[fill] = shapes.get(fill, "") + shape
        text = str(number)
        if number >= 0 and tall > 12 and 6.5 * len(text) + 3 <= width:
            texts.setdefault(text_colour(colour), []).append(
                f'<tspan x="{_num(x + width / 2)}">{text}</tspan>'
            )
    yield from (f'<path fill="{fill}" d="{shape}"/>' for fill, shape in shapes.items())
    for fill, spans in texts.items():
        middle = _num(y + tall / 2 + 4)
        style = f'y="{middle}" text-anchor="middle" style="fill:{fill}"'
        yield f'<text class="b" {style}>{"".join(spans)}</text>'


def _axis(span: float, scale: float, y: float, unit: str) -> Iterator[str]:
    step = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500) if span / size <= 14)
    yield f'<path class="a" d="M{_LEFT} {_num(y)}H{_num(_LEFT + span * scale)}"/>'
    for tick in range(0, int(span) + 1, step):
        x = _num(_LEFT + tick * scale)
        yield f'<text x="{x}" y="{_num(y + 16)}" text-anchor="middle">{tick}</text>'
    yield f'<text x="{_WIDTH}" y="{_num(y + 16)}" text-anchor="end">time in {unit}</text>'


def _legend(timelines: Sequence[Timeline], top: float) -> Iterator[str]:
    used = {
        event.instruction.kind
        for timeline in timelines
        for rank in range(len(timeline.program.ranks))
        for event in timeline.events(rank)
        if event.end > event.start
    }
    x = float(_LEFT)
    for kind in (kind for kind in KINDS if kind in used and KINDS[kind].occupies != "wire"):
        for half in (0, 1):
            colour = bar_colour(kind.value, half, 2)
            yield (
                f'<rect x="{_num(x + 12 * half)}" y="{_num(top + 4)}" width="12" height="12" '
                f'fill="{_hex(colour)}"/>'
            )
        words = _words(kind)
        yield f'<text x="{_num(x + 30)}" y="{_num(top + 14)}">{words}</text>'
        x += 30 + 6.4 * len(words) + 14
    yield f'<text x="{_num(x)}" y="{_num(top + 14)}">light: first stage, dark: last</text>'


def _words(kind: Kind) -> str:
    return f"{kind.value} {KINDS[kind].word}" if len(kind.value) == 1 else KINDS[kind].word


def _rect(style: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{style}" x="{_num(x)}" y="{_num(y)}" width="{_num(width)}" '
        f'height="{_num(height)}"/>'
    )


def _hex(colour: Rgb) -> str:
    return "#" + "".join(f"{round(part * 255):02x}" for part in colour)


def _num(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
