"""How the jobs of a sweep have learnt: their losses over steps and over seconds, side by side.

Who learns most from a step is not always who learns most in a minute: the one axis compares
trainings, the other what one gets for one's time. Both are drawn from ``metrics.csv`` of each job,
for ``sweep.html`` as SVG, for ``sweep.png`` by Matplotlib, which is imported only there.

A batch's loss is noisy, so the line is the mean over the last tenth of the rows; in the picture the
losses themselves stand behind it, pale. The picture is cut above the highest such mean behind the
first tenth: what all jobs fall from would leave no room for what tells them apart.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.report.summary import round_ticks
from strategies.small_file import read_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BYTES = 1 << 26
_MOST_POINTS = 2_000  # of one line
_TENTH = 10
# Okabe and Ito's, which colour-blind people can tell apart, yellow left out; then dashed.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
_DASHES = ("", "6 3", "2 2")

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 330, 52, 14, 10, 40


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The rows of a job that have a training loss.

    Attributes:
        steps: Optimizer steps.
        seconds: Since training began; empty where the file does not say.
        losses: ``train_loss``, in nats; not all of them need be finite.
    """

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def means(self) -> tuple[float, ...]:
        """At each row the mean over the last tenth of all rows, of those there are till then."""
        width = max(1, len(self.losses) // _TENTH)
        found = []
        for place in range(len(self.losses)):
            last = self.losses[max(0, place + 1 - width) : place + 1]
            found.append(sum(last) / len(last))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class NamedCurve:
    """A curve and what tells its job from the others."""

    name: str
    curve: LossCurve

    @property
    def words(self) -> str:
        return f"{self.name}: {self.curve.means[-1]:.4f}"


def read_curve(path: Path) -> LossCurve | None:
    """What ``metrics.csv`` says; None where there are no two losses, or no such file."""
    try:
        text = read_bytes(path, most_bytes=_MOST_BYTES).decode("utf-8", errors="replace")
        rows = [
            (int(row["step"]), row.get("elapsed_s") or "", float(row["train_loss"]))
            for row in csv.DictReader(io.StringIO(text))
            if row.get("step") and row.get("train_loss")
        ]
        if len(rows) < 2:
            return None
        rows = rows[:: -(-len(rows) // _MOST_POINTS)]
        steps, seconds, losses = zip(*rows, strict=True)
        known = tuple(map(float, seconds)) if all(seconds) else ()
        return LossCurve(steps, known, losses)
    except (OSError, ValueError, KeyError, csv.Error):
        return None


def curves_html(curves: Sequence[NamedCurve]) -> str:
    """A section with a drawing per axis and one legend; nothing where there are no curves."""
    if not curves:
        return ""
    keys = "".join(
        f'<span><svg width="30" height="10"><path d="M0,5H30" {_stroke(number)}/></svg>'
        f"{escape(named.words)}</span>"
        for number, named in enumerate(curves)
    )
    drawings = "".join(_svg(curves, axis) for axis in _axes(curves))
    return (
        '<section class="curves"><h2>Training loss <span class="facts">lines: mean over the last '
        f"tenth of the rows; behind each name that of its end</span></h2>\n"
        f'<p class="keys">{keys}</p>\n<div class="plans">{drawings}</div></section>\n'
    )


def draw_curves(axes: Sequence[Axes], curves: Sequence[NamedCurve], colours: Sequence[str]) -> None:
    """Draws the curves into the two axes of a picture.

    ``colours``: of texts and of lines of the frame.
    """
    from matplotlib.ticker import MaxNLocator

    low, high = _bounds(curves)
    for target, axis in zip(axes, ("steps", "seconds"), strict=True):
        for number, named in enumerate(curves):
            places = getattr(named.curve, axis)
            if not places:
                continue
            colour, dashes = _look(number)
            style = (0, tuple(map(float, dashes.split()))) if dashes else "-"
            target.plot(places, named.curve.losses, color=colour, linewidth=0.6, alpha=0.22)
            target.plot(
                places, named.curve.means, color=colour, linewidth=1.7, linestyle=style,
                label=named.words,
            )  # fmt: skip
        target.set_ylim(low, high)
        target.set_xlim(left=0)
        target.xaxis.set_major_locator(MaxNLocator(6))
        target.set_xlabel(_TITLES[axis], fontsize=7.5, color=colours[0], labelpad=3)
        target.tick_params(labelsize=7.5, colors=colours[0], length=3, width=0.6)
        target.grid(color=colours[1], linewidth=0.6)
        for side, spine in target.spines.items():
            spine.set_visible(side in ("bottom", "left"))
            spine.set_color(colours[1])
    axes[0].set_ylabel(
        "training loss, and its mean over a tenth", fontsize=7.5, color=colours[0], labelpad=3
    )
    axes[0].legend(fontsize=7.5, frameon=False, labelcolor=colours[0], loc="upper right")


_TITLES = {"steps": "optimizer steps", "seconds": "seconds of training"}


def _axes(curves: Sequence[NamedCurve]) -> Iterator[str]:
    yield "steps"
    if any(named.curve.seconds for named in curves):
        yield "seconds"


def _look(number: int) -> tuple[str, str]:
    dashes = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    return _COLOURS[number % len(_COLOURS)], dashes


def _stroke(number: int) -> str:
    colour, dashes = _look(number)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'fill="none" stroke-width="2" stroke="{colour}"{dashed}'


def _bounds(curves: Sequence[NamedCurve]) -> tuple[float, float]:
    """Lowest mean, and highest behind the first tenth, with a little room."""
    lows, highs = [], []
    for named in curves:
        means = named.curve.means
        lows += [mean for mean in means if math.isfinite(mean)]
        highs += [mean for mean in means[len(means) // _TENTH :] if math.isfinite(mean)]
    low, high = min(lows, default=0.0), max(highs or lows, default=1.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _svg(curves: Sequence[NamedCurve], axis: str) -> str:
    low, high = _bounds(curves)
    last = max((getattr(n.curve, axis)[-1] for n in curves if getattr(n.curve, axis)), default=1)
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(place: float) -> float:
        return _LEFT + place / (last or 1) * (right - _LEFT)

    def y(loss: float) -> float:
        return floor - (loss - low) / (high - low) * (floor - _TOP)

    marks = "".join(
        f'<path class="axis" d="M{_LEFT},{y(tick):.1f}H{right}"/>'
        f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in round_ticks(low, high)
    )
    marks += "".join(
        f'<text x="{x(tick):.1f}" y="{floor + 15}" text-anchor="middle">{tick:g}</text>'
        for tick in round_ticks(0.0, float(last or 1))
    )
    lines = "".join(
        f'<path d="{_path(named.curve, axis, x, y)}" {_stroke(number)}>'
        f"<title>{escape(named.words)}</title></path>"
        for number, named in enumerate(curves)
        if getattr(named.curve, axis)
    )
    clip = f"loss-over-{axis}"
    return (
        f'<svg class="front curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="training loss over {_TITLES[axis]}"><clipPath id="{clip}">'
        f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{floor - _TOP}"/></clipPath>'
        f'{marks}<g clip-path="url(#{clip})">{lines}</g>'
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">'
        f"{_TITLES[axis]}</text></svg>"
    )


def _path(curve: LossCurve, axis: str, x: object, y: object) -> str:
    """What is not finite breaks the line."""
    assert callable(x)
    assert callable(y)
    found, pen = [], "M"
    for place, mean in zip(getattr(curve, axis), curve.means, strict=True):
        if math.isfinite(mean):
            found.append(f"{pen}{x(place):.1f},{y(mean):.1f}")
            pen = "L"
        else:
            pen = "M"
    return " ".join(found)
