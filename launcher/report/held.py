"""Activations that a rank holds, over time: the curve behind the peaks of the metrics."""

from __future__ import annotations

from strategies.ir.instruction import Kind
from strategies.timeline import Timeline

Curve = tuple[tuple[float, float], ...]


def held_over_time(timeline: Timeline, rank: int) -> Curve:
    """(time, held from then on) in full-rank microbatches, wherever the figure changes.

    A forward counts from its start, until its backward (or W) ends; in a forward-only program until
    the forward itself ends. The first point lies at the timeline's origin.
    """
    program = timeline.program
    share = 1.0 / program.placement.stages_per_microbatch
    keeps = program.role != "forward"
    changes: list[tuple[float, int]] = []
    for event in timeline.compute(rank):
        for kind in (part.kind for part in event.instruction.parts):
            if kind is Kind.F:
                changes.append((event.start, 1))
            if kind is Kind.B or kind is Kind.W or (kind is Kind.F and not keeps):
                changes.append((event.end, -1))
    rank_of = program.placement.rank_of
    held = sum(rank_of(stage, m) == rank for stage, m in program.entry.in_flight)
    points = [(timeline.origin_time, held * share)]
    # At one moment, what ends is freed before what begins is kept: the order of the list.
    for time, change in sorted(changes):
        held += change
        if time == points[-1][0]:
            points.pop()
        points.append((time, held * share))
    return tuple(points)
