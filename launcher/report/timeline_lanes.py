"""Spreads events that overlap in time over several lanes, so that no picture hides one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from strategies.analysis.timeline import Event, Timeline
from strategies.ir.kinds import CHANNEL_KINDS, COMPUTE_KINDS, Kind

# Sums of durations round: a start this little (of the rank's whole time) before the end of the
# event in front of it is no overlap.
_TOLERANCE = 1e-6


def compute_lanes(timeline: Timeline, rank: int) -> tuple[tuple[Event, ...], ...]:
    """The rank's F B I W R STEP events; one lane unless a fused pair runs two of them at once."""
    return _lanes(timeline, rank, COMPUTE_KINDS)


def channel_lanes(timeline: Timeline, rank: int) -> tuple[tuple[Event, ...], ...]:
    """The rank's REDUCE and GATHER events; one lane unless its collectives overlap."""
    return _lanes(timeline, rank, CHANNEL_KINDS)


def uses_channel(timeline: Timeline) -> bool:
    """Whether any collective takes time; free ones need no line in a picture."""
    ranks = range(len(timeline.program.ranks))
    return any(channel_lanes(timeline, rank) for rank in ranks)


def _lanes(timeline: Timeline, rank: int, kinds: frozenset[Kind]) -> tuple[tuple[Event, ...], ...]:
    shown = [e for e in timeline.events(rank) if e.instruction.kind in kinds and e.end > e.start]
    longest = max((event.end for event in shown), default=0.0)
    return spread(shown, tolerance=_TOLERANCE * longest)


def spread(events: Iterable[Event], *, tolerance: float = 0.0) -> tuple[tuple[Event, ...], ...]:
    """First lane that is free, by start; events of one lane do not overlap."""
    lanes: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        free = next((lane for lane in lanes if lane[-1].end <= event.start + tolerance), None)
        if free is None:
            lanes.append([event])
        else:
            free.append(event)
    return tuple(map(tuple, lanes))


# ------------------------------------------------------------------------------------------ zeroed
#
# Timelines on a clock that starts at their first instruction.


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
