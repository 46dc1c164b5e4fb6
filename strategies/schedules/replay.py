"""When the instructions of an order run under given durations: what a search compares orders by.

The same model as the simulator's (a message takes its latency and no more, sends are buffered),
without messages, reductions or optimizer steps, and for split backwards only, so that it takes a
millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.schedules.lanes import F, I, Lanes, StepRows, W
from strategies.schedules.schedule import Durations

_UNKNOWN = -1.0


@dataclass(frozen=True, slots=True)
class Replay:
    """Times of an order, in the unit of the durations.

    Attributes:
        makespan: First start to last end.
        period: Max over ranks of (end - start).
        forward: When each F began, per lane and index.
        backward: When each I began, per lane and index.
    """

    makespan: float
    period: float
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]


def replay(lanes: Lanes, durations: Durations, rows: StepRows) -> Replay:
    """Runs the lists of all ranks, each instruction as early as it can."""
    parts = (durations.forward, durations.backward_input, durations.backward_weight)
    took = [[part[stage] for stage in lanes.stage] for part in parts]
    goes_to = [[next_of(lanes, kind, lane) for lane in range(len(lanes.rank))] for kind in (F, I)]
    # When the input of the next instruction is there, per kind, lane and index; then its start.
    times = [[[_UNKNOWN] * n for n in lanes.size] for _ in (F, I)]
    for lane, stage in enumerate(lanes.stage):
        if stage == 0:
            times[F][lane] = [0.0] * lanes.size[lane]
    position = [0] * len(rows)
    now = [0.0] * len(rows)
    first = [_UNKNOWN] * len(rows)
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        row, place, time = rows[rank], position[rank], now[rank]
        while place < len(row):
            kind, lane, index = row[place]
            if kind == W:
                time += took[W][lane]
                place += 1
                continue
            there = times[kind][lane][index]
            if there < 0.0:
                break
            if there > time:
                time = there
            times[kind][lane][index] = time
            if place == 0:
                first[rank] = time
            time += took[kind][lane]
            place += 1
            target, direction = goes_to[kind][lane]
            if target >= 0:
                if lanes.rank[target] == rank:
                    times[direction][target][index] = time
                else:
                    times[direction][target][index] = time + durations.latency
                    ready.append(lanes.rank[target])
        position[rank], now[rank] = place, time
    assert all(place == len(row) for place, row in zip(position, rows, strict=True))
    return Replay(
        max(now),
        max(end - start for start, end in zip(first, now, strict=True)),
        tuple(map(tuple, times[F])),
        tuple(map(tuple, times[I])),
    )


def next_of(lanes: Lanes, kind: int, lane: int) -> tuple[int, int]:
    """(lane, F or I) that takes up what an F or I has made; lane -1 after the first stage's I."""
    if kind == I:
        return (lane - 1 if lanes.stage[lane] else -1), I
    if lanes.stage[lane] + 1 < lanes.num_stages:
        return lane + 1, F
    return lane, I
