"""One run's timelines as a picture: for trackers, which show images and no pages."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report.html import Panel
from launcher.report.sweep_job import JobTimeline, read_timelines
from launcher.report.sweep_panels import PicturePanel, bars
from launcher.report.sweep_png import sweep_png
from launcher.report.units import format_duration, format_percent


def timeline_png(page: str, panels: Sequence[Panel], *, title: str) -> bytes:
    """Draws what ``timeline.html`` shows, without its memory.

    Args:
        page: As ``timeline_html`` has made it.
        panels: Of which it has been made.
        title: What stands above.
    """
    drawn = [_panel(read, panel) for read, panel in zip(read_timelines(page), panels, strict=True)]
    return sweep_png(drawn, title=title)


def _panel(read: JobTimeline, panel: Panel) -> PicturePanel:
    timeline = panel.timeline
    facts = (
        f"makespan {format_duration(timeline.makespan, timeline.time_unit)}, "
        f"bubble {format_percent(timeline.bubble_ratio)}"
    )
    placement = timeline.program.placement
    return PicturePanel(
        label=panel.label,
        facts=facts,
        unit=timeline.time_unit,
        makespan=timeline.makespan,
        num_stages=placement.num_stages,
        num_ranks=len(timeline.program.ranks),
        bars=bars(read),
    )
