"""The timelines of a sweep as bars with a place: what a picture of all of them needs to know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.report.sweep_figures import FIGURES
from launcher.report.sweep_job import JobTimeline, SweepJob
from launcher.report.sweep_labels import Sweep
from launcher.report.units import format_duration, format_percent

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
