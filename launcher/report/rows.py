"""A timeline as data: rows of bars, from which every page, picture and trace is written.

What stands here knows nothing of colours, pages or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from strategies.analysis.memory import Sizes, held_changes
from strategies.analysis.timeline import Event, Timeline
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import CHANNEL_KINDS, COMPUTE_KINDS, EXCHANGE_KINDS, KINDS, Kind
from strategies.ir.versions import weight_versions

KIND_NAMES = tuple(kind.value for kind in Kind)
_AXIS = {"F": "time in F (one rank's forward of one microbatch)", "s": "time"}
# Sums of durations round: a start this little (of the rank's whole time) before the end of the
# event in front of it is no overlap.
_TOLERANCE = 1e-6

Lanes = tuple[tuple[Event, ...], ...]
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """What a rank does, spread over lanes so that no bar hides another.

    Attributes:
        compute: F B I W R STEP; one lane unless a fused pair runs two of them at once.
        channel: REDUCE and GATHER; one lane unless the rank's collectives overlap.
    """

    compute: Lanes
    channel: Lanes


@dataclass(frozen=True, slots=True)
class TimelineData:
    """A timeline for those that know no programs: scripts, and whoever finds it in a file.

    Attributes:
        panel: What JSON has words for. ``unit``, ``axis`` (its title), ``makespan``, ``stages``,
            ``channel`` (whether any collective takes time) and ``rows``: per rank the lanes of
            bars ``compute`` and ``channel``, and ``held``, see ``held_over_time``. A bar is [kind,
            stage, microbatch or bucket or -1, start, end, waited for, its rank, how, since, pair],
            its kind an index into ``KINDS``; the pair of a fused instruction is its backward's
            [kind, stage, microbatch], else null.
    """

    label: str
    panel: Mapping[str, object]


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


def timeline_rows(timeline: Timeline, *, instants: bool = False) -> tuple[Row, ...]:
    """A row per rank.

    Args:
        timeline: With its first start at 0.
        instants: Whether what takes no time is there as well. No bar then begins before the one
            in front of it has ended, not even by what sums of durations round.
    """
    rows = []
    for rank in range(len(timeline.program.ranks)):
        events = (*timeline.events(rank), *timeline.exchanges(rank))
        events = tuple(e for e in events if instants or e.end > e.start)
        compute = [e for e in events if e.instruction.kind in COMPUTE_KINDS]
        channel = [e for e in events if e.instruction.kind in CHANNEL_KINDS | EXCHANGE_KINDS]
        share = 0.0 if instants else _TOLERANCE
        rows.append(Row(_spread(compute, share), _spread(channel, share)))
    return tuple(rows)


def uses_channel(rows: Iterable[Row]) -> bool:
    """Whether any collective takes time; free ones need no line in a picture."""
    return any(row.channel for row in rows)


def timeline_data(label: str, timeline: Timeline) -> TimelineData:
    """The rows with all that a picture says about them, times to seven digits."""
    timeline = zeroed(timeline)
    rows = timeline_rows(timeline)
    panel: dict[str, object] = {
        "unit": timeline.time_unit,
        "axis": _AXIS[timeline.time_unit],
        "makespan": _short(timeline.makespan),
        "stages": timeline.program.placement.num_stages,
        "channel": uses_channel(rows),
        "rows": list(_row_data(timeline, rows)),
    }
    if timeline.program.updates is not None:
        # As many shades as there may be versions beside each other, and one more.
        panel["versions"] = 1 + max(weight_versions(timeline.program))
    return TimelineData(label, panel)


def _spread(events: Iterable[Event], share: float) -> Lanes:
    """First lane that is free, by start; a ``share`` of the last end is no overlap."""
    ordered = sorted(events, key=lambda e: (e.start, e.end))
    tolerance = share * max((event.end for event in ordered), default=0.0)
    lanes: list[list[Event]] = []
    for event in ordered:
        free = next((lane for lane in lanes if lane[-1].end <= event.start + tolerance), None)
        if free is None:
            lanes.append([event])
        else:
            free.append(event)
    return tuple(map(tuple, lanes))


def _row_data(timeline: Timeline, rows: Iterable[Row]) -> Iterator[dict[str, object]]:
    graph = timeline.program.graph
    waiting = waits(timeline)
    for rank, row in enumerate(rows):
        own = range(graph.offsets[rank], graph.offsets[rank + 1])
        wait_of = {graph.nodes[node]: waiting.get(node) for node in own}

        def bars(
            lanes: Lanes, wait_of: dict[Instruction, Wait | None] = wait_of
        ) -> list[list[list[object]]]:
            return [[_bar(timeline, e, wait_of.get(e.instruction)) for e in lane] for lane in lanes]

        held = held_over_time(timeline, rank)
        yield {
            "compute": bars(row.compute),
            "channel": bars(row.channel),
            "held": [(_short(time), _short(value)) for time, value in held],
        }


def _bar(timeline: Timeline, event: Event, wait: Wait | None) -> list[object]:
    item = event.instruction
    number = item.bucket if item.microbatch is None else item.microbatch
    where = [item.stage, -1 if number is None else number]
    span = [_short(event.start), _short(event.end)]
    waited: list[object] = ["", -1, "", 0.0]
    if wait is not None:
        graph = timeline.program.graph
        name = str(graph.nodes[wait.node]).partition("@")[0]
        waited = [name, graph.rank[wait.node], wait.how, _short(wait.since)]
    elif item.kind in EXCHANGE_KINDS and item.payload is not None:
        host = f"{item.stage}{item.payload.value}{item.microbatch}"  # it comes inside of that
        waited = [host, event.rank, "release", _short(event.start)]
    pair = None
    if item.halves:
        half = item.halves[1]
        pair = [KIND_NAMES.index(half.kind.value), half.stage, half.microbatch]
    bar = [KIND_NAMES.index(item.kind.value), *where, *span, *waited, pair]
    # Where there are several versions of the weights, the one that it reads, or makes.
    return bar if item.version is None else [*bar, item.version]


def _short(value: float) -> float:
    """Seven digits: what a picture can show, at half the size."""
    return float(f"{value:.7g}")


# Activations that a rank holds, over time: the curve behind the peaks of the metrics.


def held_over_time(timeline: Timeline, rank: int) -> Curve:
    """(time, held from then on) in full-rank microbatches, wherever the figure changes.

    A forward counts from its start, until its backward (or W) ends; in a forward-only program until
    the forward itself ends. One that is recomputed counts for its input only until its R begins.
    The first point lies at the timeline's origin.
    """
    program = timeline.program
    share = 1.0 / program.placement.stages_per_microbatch
    count = program.placement.num_stages
    sizes = Sizes.whole((1.0,) * count, timeline.stage_input)
    changes: list[tuple[float, float]] = []
    for place, taken, freed in held_changes(program, rank, sizes):
        changes += [(timeline.start[rank][place], taken)] if taken else []
        changes += [(timeline.end[rank][place], -freed)] if freed else []
    held = 0.0
    points = [(timeline.origin_time, held * share)]
    # At one moment, what ends is freed before what begins is kept: the order of the list.
    for time, change in sorted(changes):
        held += change
        if time == points[-1][0]:
            points.pop()
        points.append((time, held * share))
    return tuple(points)


# What each instruction waited for: the last of its predecessors to end.


class Wait(NamedTuple):
    """Why an instruction did not begin earlier.

    Attributes:
        node: The predecessor, numbered as in ``program.graph``.
        how: ``message``, ``value`` (made on the same rank), ``rank`` (busy until then), ``channel``
            (busy until then) or ``release`` (a gradient bucket that got ready inside it).
        since: When the predecessor ended, or its message arrived, in the timeline's unit.
    """

    node: int
    how: str
    since: float


def waits(timeline: Timeline) -> dict[int, Wait]:
    """The wait of every instruction on a rank or channel that has a predecessor.

    Of predecessors that end together the rank's own counts: the rank did not stand idle.
    """
    program = timeline.program
    graph = program.graph
    events = [e for rank in range(len(program.ranks)) for e in timeline.events(rank)]
    start, end = [e.start for e in events], [e.end for e in events]
    found: dict[int, Wait] = {}
    for rank in range(len(program.ranks)):
        busy: dict[str, int] = {}
        for node in range(graph.offsets[rank], graph.offsets[rank + 1]):
            kind = graph.nodes[node].kind
            place = KINDS[kind].occupies
            if place == "wire":
                continue
            candidates = [_need(timeline, need, end[need]) for need in graph.needs[node]]
            if kind is Kind.REDUCE and not graph.nodes[node].after:
                candidates = [
                    Wait(wait.node, "release", min(wait.since, start[node])) for wait in candidates
                ]
            if place in busy:
                candidates.insert(0, Wait(busy[place], place, end[busy[place]]))
            busy[place] = node
            if candidates:
                found[node] = max(candidates, key=lambda wait: wait.since)
    return found


def _need(timeline: Timeline, need: int, ended: float) -> Wait:
    graph = timeline.program.graph
    if graph.nodes[need].kind is Kind.RECV:
        return Wait(graph.needs[graph.partner[need]][0], "message", ended)
    return Wait(need, "value", ended)
