"""What each instruction waited for: the last of its predecessors to end."""

from __future__ import annotations

from typing import NamedTuple

from strategies.ir.instruction import CHANNEL_KINDS, COMPUTE_KINDS, Kind
from strategies.timeline import Timeline


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
    start = [time for row in timeline.start for time in row]
    end = [time for row in timeline.end for time in row]
    found: dict[int, Wait] = {}
    for rank in range(len(program.ranks)):
        busy: dict[str, int] = {}
        for node in range(graph.offsets[rank], graph.offsets[rank + 1]):
            kind = graph.nodes[node].kind
            if kind not in COMPUTE_KINDS and kind not in CHANNEL_KINDS:
                continue
            place = "rank" if kind in COMPUTE_KINDS else "channel"
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
