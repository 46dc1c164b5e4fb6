"""sweep.png: all timelines of a sweep under each other on one time scale, for slides and mails.

Where jobs have trained, how they have learnt stands above them.

Colours are those of the interactive pages (timeline.js). Matplotlib is imported when a picture is
drawn: nothing else waits for it.
"""

from __future__ import annotations

import io
import logging
import secrets
import warnings
from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.report.html import Panel
from launcher.report.rows import KIND_NAMES, TimelineData
from launcher.report.summary import SECONDS, format_duration, format_percent
from launcher.report.sweep.loss_curves import NamedCurve, draw_curves
from launcher.report.sweep.sweep_figures import timeline_facts
from launcher.report.sweep.sweep_jobs import Sweep, SweepJob
from strategies.ir.kinds import KINDS, MICROBATCH_KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Transform


Rgb = tuple[float, float, float]

# What computes a microbatch first.
_SHOWN = {
    kind.value: facts
    for kind, facts in sorted(KINDS.items(), key=lambda row: row[0] not in MICROBATCH_KINDS)
    if facts.occupies != "wire"
}
_OTHER = (348, 45)  # a kind that a later version knows

# Lengths are in points of 1/100 inch, each of which becomes 1.6 pixels.
_DPI, _SCALE = 100, 1.6
_WIDTH, _LEFT, _RIGHT = 1500, 62, 24
_HEADER, _HEADING, _GAP, _AXIS = 66, 25, 14, 44
_MAX_HEIGHT = 12_000
_CURVES = 460  # height of the curves with their axis
# (ranks in all panels, height of a row): many rows are thinner.
_ROWS = ((16, 24), (40, 20), (80, 16), (200, 11))
_THINNEST = 7
_MAX_TEXTS = 4_000  # on bars; more of them take seconds
_CHARACTER = 6.4  # width of one in a bar's text
_MAX_TITLE = 150
_TEXT, _MUTED, _IDLE, _LINE = "#1c1c1e", "#63636b", "#efeff2", "#d4d4da"
_COMPUTE_SHARE = 0.66  # of a rank's row, where its collectives have a line of their own


def bar_colour(kind: str, stage: int, num_stages: int) -> Rgb:
    """The kind's hue, from light for the first stage to dark for the last."""
    hue, saturation = _SHOWN[kind].colour if kind in _SHOWN else _OTHER
    position = stage / (num_stages - 1) if num_stages > 1 else 0.4
    return hls_to_rgb(hue / 360, (76 - 36 * position) / 100, saturation / 100)


def text_colour(fill: Rgb) -> str:
    """The better readable one of black and white upon a colour."""
    red, green, blue = (value**2.2 for value in fill)
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.2 else "#121316"


@dataclass(frozen=True, slots=True)
class Bar:
    """One instruction; borders are shares of its row, ``number`` is -1 where it has none."""

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
        return str(self.stage if self.number < 0 else self.number)

    @property
    def text(self) -> str:
        """What is written upon it where there is room; a fused pair names its forward."""
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
    found = [_job_panel(sweep, job, timeline) for job in sweep.jobs for timeline in job.timelines]
    units = list(dict.fromkeys(panel.unit for panel in found))
    return tuple(sorted(found, key=lambda panel: units.index(panel.unit)))


def _job_panel(sweep: Sweep, job: SweepJob, timeline: TimelineData) -> PicturePanel:
    label = sweep.label(job)
    if len(job.timelines) > 1:
        label += f", {timeline.label}"
    if job.status != "done":
        label += f" ({job.status})"
    return _panel(timeline, label, timeline_facts(job, timeline))


def _panel(timeline: TimelineData, label: str, facts: str) -> PicturePanel:
    data: Any = timeline.panel
    return PicturePanel(
        label=label,
        facts=facts,
        unit=data["unit"],
        makespan=data["makespan"],
        num_stages=data["stages"],
        num_ranks=len(data["rows"]),
        bars=tuple(_bars(data["rows"], channel=data["channel"])),
    )


def _bars(rows: Sequence[Any], *, channel: bool) -> Iterator[Bar]:
    border = _COMPUTE_SHARE if channel else 1.0
    for rank, row in enumerate(rows):
        for lanes, top, bottom in ((row["compute"], 0.0, border), (row["channel"], border, 1.0)):
            for lane, bars in enumerate(lanes):
                high = top + (bottom - top) * lane / len(lanes)
                low = top + (bottom - top) * (lane + 1) / len(lanes)
                for kind, stage, number, start, end, *_ in bars:
                    yield Bar(rank, high, low, KIND_NAMES[kind], stage, number, start, end)


def write_sweep_png(path: Path, sweep: Sweep, *, title: str) -> int:
    """Writes ``sweep.png``, all or nothing.

    ``sweep``: with at least one timeline.

    Returns:
        How many timelines found no room.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError: The file cannot be written.
    """
    panels = picture_panels(sweep)
    row = _row_height(panels)
    shown: list[PicturePanel] = []
    curves = sweep.curves
    height = _HEADER + 2 * _AXIS + (_CURVES if curves else 0)
    for panel in panels:
        height += _panel_height(panel, row)
        if height > _MAX_HEIGHT and shown:
            break
        shown.append(panel)
    content = sweep_png(shown, title=title, curves=curves)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(panels) - len(shown)


def sweep_png(
    panels: Sequence[PicturePanel], *, title: str, curves: Sequence[NamedCurve] = ()
) -> bytes:
    """The picture; panels with one time unit must stand beside each other."""
    with warnings.catch_warnings():
        # Characters that the font lacks become boxes, which is no reason to complain.
        warnings.simplefilter("ignore")
        # Nor is a home folder that it cannot keep its list of fonts in.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        row = _row_height(panels)
        units = dict.fromkeys(panel.unit for panel in panels)
        groups = [[panel for panel in panels if panel.unit == unit] for unit in units]
        heights = [sum(_panel_height(panel, row) for panel in group) for group in groups]
        above = _HEADER + (_CURVES if curves else 0)
        height = above + sum(heights) + _AXIS * len(groups)
        figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), facecolor="white")
        _header(figure, height, title, panels)
        if curves:
            draw_curves(_halves(figure, height), curves, (_MUTED, _LINE))
        y = float(above)
        for group, tall in zip(groups, heights, strict=True):
            bottom = 1 - (y + tall) / height
            axes = figure.add_axes(
                (_LEFT / _WIDTH, bottom, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, tall / height)
            )
            _group(axes, group, row, tall)
            y += tall + _AXIS
        file = io.BytesIO()
        FigureCanvasAgg(figure)
        figure.savefig(file, format="png", dpi=_DPI * _SCALE)
        return file.getvalue()


def _halves(figure: Figure, height: float) -> tuple[Axes, Axes]:
    """Two axes side by side, below the header."""
    wide = (_WIDTH - 2 * _LEFT - 2 * _RIGHT) / 2
    tall, bottom = _CURVES - _AXIS - 20, 1 - (_HEADER + _CURVES - _AXIS) / height

    def add(left: float) -> Axes:
        return figure.add_axes((left / _WIDTH, bottom, wide / _WIDTH, tall / height))

    return add(_LEFT), add(_LEFT + wide + _RIGHT + _LEFT)


def _row_height(panels: Sequence[PicturePanel]) -> int:
    ranks = sum(panel.num_ranks for panel in panels)
    return next((height for most, height in _ROWS if ranks <= most), _THINNEST)


def _panel_height(panel: PicturePanel, row: int) -> int:
    return _HEADING + panel.num_ranks * row + _GAP


def _header(figure: Figure, height: float, title: str, panels: Sequence[PicturePanel]) -> None:
    from matplotlib.patches import Rectangle

    def place(x: float, y: float) -> tuple[float, float]:
        return x / _WIDTH, 1 - y / height

    if len(title) > _MAX_TITLE:
        title = title[: _MAX_TITLE - 3] + "..."
    _write(figure, *place(16, 20), title, 11, _TEXT, bold=True)
    used = {bar.kind for panel in panels for bar in panel.bars}
    x = 16.0
    for kind in [*(k for k in _SHOWN if k in used), *sorted(used - _SHOWN.keys())]:
        for half in (0, 1):
            corner = place(x + 13 * half, 51)
            size = (13 / _WIDTH, 11 / height)
            colour = bar_colour(kind, half, 2)
            figure.add_artist(Rectangle(corner, *size, color=colour, linewidth=0))
        words = f"{kind} {_SHOWN[kind].word}" if kind in _SHOWN else kind
        _write(figure, *place(x + 32, 45.5), words, 7.5, _MUTED)
        x += 32 + 6.1 * len(words) + 18
    if not used:
        return
    note = "light: first stage, dark: last stage; 2F0: stage 2, forward, microbatch 0"
    _write(figure, *place(x, 45.5), note, 7.5, _MUTED)


def _group(axes: Axes, panels: Sequence[PicturePanel], row: int, height: int) -> None:
    """Panels over one time axis; y counts points from the top."""
    unit = panels[0].unit
    span = max(panel.makespan for panel in panels) or 1.0
    scale = 1.0
    if unit == "s":
        scale, unit = next((pair for pair in SECONDS if span >= pair[0]), SECONDS[-1])
    axes.set_xlim(0, span / scale)
    axes.set_ylim(height, 0)
    axes.set_yticks([])
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=_LINE, linewidth=0.6)
    axes.tick_params(axis="x", labelsize=7.5, colors=_MUTED, length=3, width=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_LINE)
    what = "time in F (one rank's forward of one microbatch)" if unit == "F" else f"time in {unit}"
    axes.set_xlabel(what, fontsize=7.5, color=_MUTED, labelpad=3)
    drawing = _Drawing(axes, row, (_WIDTH - _LEFT - _RIGHT) * scale / span)
    top = 0
    for panel in panels:
        drawing.panel(panel, top, scale)
        top += _panel_height(panel, row)
    drawing.finish()


@dataclass(frozen=True, slots=True)
class _Label:
    x: float
    y: float
    text: str
    colour: str


class _Drawing:
    """Collects the rectangles of a group: one collection is drawn far faster than many bars."""

    def __init__(self, axes: Axes, row: int, points: float) -> None:
        self._axes = axes
        self._row = row
        self._points = points  # per unit of the axis
        self._shapes: list[tuple[tuple[float, float], ...]] = []
        self._colours: list[Rgb | str] = []
        self._labels: list[_Label] = []

    def panel(self, panel: PicturePanel, top: int, scale: float) -> None:
        """Adds one timeline, its upper border at ``top``; times are divided by ``scale``."""
        from matplotlib.transforms import blended_transform_factory

        axes = self._axes
        edge = blended_transform_factory(axes.transAxes, axes.transData)
        heading = _write(axes, 0, top + 13, panel.label, 9, _TEXT, bold=True, transform=edge)
        axes.annotate(
            panel.facts, (1, 0.5), xytext=(9, 0), xycoords=heading, textcoords="offset points",
            va="center", fontsize=8, color=_MUTED, annotation_clip=False, parse_math=False,
        )  # fmt: skip
        first = top + _HEADING
        for rank in range(panel.num_ranks):
            y = first + rank * self._row
            self._add(0, panel.makespan / scale, y, y + self._row - self._space, _IDLE)
            if self._row >= 11 or rank % 4 == 0:
                _write(
                    axes, -6 / (_WIDTH - _LEFT - _RIGHT), y + (self._row - self._space) / 2,
                    f"rank {rank}", 7.5 if self._row >= 14 else 6, _MUTED,
                    transform=edge, align="right",
                )  # fmt: skip
        lengths: dict[str, tuple[int, int]] = {}
        for bar in panel.bars:
            full, short = lengths.get(bar.kind, (0, 0))
            lengths[bar.kind] = max(full, len(bar.text)), max(short, len(bar.short_text))
        for bar in panel.bars:
            y = first + bar.rank * self._row
            self._bar(bar, y, panel.num_stages, scale, lengths[bar.kind])

    @property
    def _space(self) -> float:
        return 3 if self._row >= 14 else 1.5

    def _bar(
        self, bar: Bar, y: float, num_stages: int, scale: float, lengths: tuple[int, int]
    ) -> None:
        """Adds a bar; it is named in the way in which all of its kind and width can be named."""
        tall = self._row - self._space
        low, high = y + bar.top * tall, y + bar.bottom * tall
        start, end = bar.start / scale, bar.end / scale
        width = (end - start) * self._points
        # A hairline between neighbours, once they are wide enough to spare it.
        hairline = min(0.9, 0.2 * width) / self._points if width > 2.5 else 0.0
        colour = bar_colour(bar.kind, bar.stage, num_stages)
        self._add(start, max(end - hairline, start + 0.4 / self._points), low, high, colour)
        if high - low < 9.5:
            return
        for text, longest in ((bar.text, lengths[0]), (bar.short_text, lengths[1])):
            if longest * _CHARACTER + 3 <= width:
                centre = (start + end - hairline) / 2
                self._labels.append(_Label(centre, (low + high) / 2, text, text_colour(colour)))
                return

    def _add(self, left: float, right: float, high: float, low: float, fill: Rgb | str) -> None:
        self._shapes.append(((left, high), (right, high), (right, low), (left, low)))
        self._colours.append(fill)

    def finish(self) -> None:
        from matplotlib.collections import PolyCollection

        self._axes.add_collection(
            PolyCollection(self._shapes, facecolors=self._colours, linewidths=0, zorder=2),
            autolim=False,
        )
        if len(self._labels) <= _MAX_TEXTS:
            for label in self._labels:
                _write(self._axes, label.x, label.y, label.text, 6.6, label.colour, align="center")


def _write(
    target: Axes | Figure,
    x: float,
    y: float,
    text: str,
    size: float,
    colour: str,
    *,
    align: Literal["left", "center", "right"] = "left",
    bold: bool = False,
    transform: Transform | None = None,
) -> Text:
    written = target.text(
        x, y, text, fontsize=size, color=colour, fontweight="bold" if bold else "normal",
        horizontalalignment=align, verticalalignment="center", parse_math=False, zorder=3,
    )  # fmt: skip
    if transform is not None:
        written.set_transform(transform)
    return written


# One run's timelines as a picture: for trackers, which show images and no pages.


def timeline_png(panels: Sequence[Panel], *, title: str) -> bytes:
    """Draws what ``timeline.html`` shows, without its memory."""
    drawn = []
    for panel in panels:
        timeline = panel.timeline
        # Without a flush the picture is of several batches, and a step is the time between two.
        flushed = timeline.program.updates is None
        took = timeline.makespan if flushed else timeline.period
        step = format_duration(took, timeline.time_unit)
        word = "makespan" if flushed else "period"
        facts = f"{word} {step}, bubble {format_percent(timeline.bubble_ratio)}"
        drawn.append(_panel(panel.data, panel.label, facts))
    return sweep_png(drawn, title=title)
