"""Activations that a rank holds, over time: the curve behind the peaks of the metrics."""

from __future__ import annotations

from strategies.memory import Holding
from strategies.timeline import Timeline

Curve = tuple[tuple[float, float], ...]


def held_over_time(timeline: Timeline, rank: int) -> Curve:
    """(time, held from then on) in full-rank microbatches, wherever the figure changes.

    A forward counts from its start, until its backward (or W) ends; in a forward-only program until
    the forward itself ends. One that is recomputed counts for its input only until its R begins.
    The first point lies at the timeline's origin.
    """
    program = timeline.program
    share = 1.0 / program.placement.stages_per_microbatch
    count = program.placement.num_stages
    holding = Holding(program, (1.0,) * count, timeline.stage_input or (0.0,) * count)
    changes: list[tuple[float, float]] = []
    for event in timeline.compute(rank):
        taken, freed = holding.taken(event.instruction), holding.freed(event.instruction)
        changes += [(event.start, taken)] if taken else []
        changes += [(event.end, -freed)] if freed else []
    held = holding.carried(rank)
    points = [(timeline.origin_time, held * share)]
    # At one moment, what ends is freed before what begins is kept: the order of the list.
    for time, change in sorted(changes):
        held += change
        if time == points[-1][0]:
            points.pop()
        points.append((time, held * share))
    return tuple(points)
