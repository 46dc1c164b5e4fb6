"""Timelines on a clock that starts at their first instruction."""

from __future__ import annotations

from dataclasses import replace

from strategies.timeline import Timeline


def zeroed(timeline: Timeline) -> Timeline:
    """The same timeline with its first start at 0; pictures draw nothing else.

    Steps that were simulated one after the other start where their predecessor ended.
    """
    origin = timeline.origin_time
    if origin == 0.0:
        return timeline

    def shift(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time - origin for time in row) for row in rows)

    return replace(timeline, start=shift(timeline.start), end=shift(timeline.end))
