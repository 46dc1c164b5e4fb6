"""A program flattened for replay: one tuple per instruction that takes time, in walk order.

Derived once per program, so that replaying it against many cost tables (a search does that
thousands of times) touches integers only.
"""

from __future__ import annotations

from typing import NamedTuple

from strategies.ir.kinds import CHANNEL_KINDS, COMPUTE_KINDS, EXCHANGE_KINDS, KINDS, Kind
from strategies.ir.program import Program

# Rows of a flat duration table: row * S + stage.
DURATION_ROWS = tuple(
    kind for kind, facts in KINDS.items() if kind in COMPUTE_KINDS and facts.duration
)


class Message(NamedTuple):
    """A message that leaves when its producer ends."""

    send: int
    recv: int
    link: int  # source rank * P + target rank
    boundary: int  # index into the program's boundaries


class Compute(NamedTuple):
    """An instruction that occupies its rank."""

    node: int
    rank: int
    duration: int  # index into the flat duration table
    needs: tuple[int, ...]
    messages: tuple[Message, ...]


class Channel(NamedTuple):
    """A REDUCE or GATHER on the rank's collective channel."""

    node: int
    rank: int
    stage: int
    bucket: int  # -1 for a GATHER
    released_by: int  # node inside which the bucket gets ready, -1: after ``needs``
    fraction: float  # of that node that has passed by then
    needs: tuple[int, ...]


class Inside(NamedTuple):
    """An exchange of tokens, on its way while the computation around it runs."""

    node: int
    host: int
    duration: int  # the host's index into the flat duration table
    number: int  # of the host's exchanges, in list order


class Walk(NamedTuple):
    """Instructions in one linear extension, messages attached to their producers."""

    steps: tuple[Compute | Channel, ...]
    num_nodes: int
    inside: tuple[Inside, ...]
    fused: tuple[tuple[int, int], ...]  # rows after ``DURATION_ROWS``: indices of both halves


def flatten(program: Program) -> Walk:
    graph = program.graph
    num_stages, num_ranks = program.placement.num_stages, program.placement.num_ranks
    row = {kind: index * num_stages for index, kind in enumerate(DURATION_ROWS)}
    boundary = {(b.source, b.target): index for index, b in enumerate(program.boundaries)}
    outgoing: dict[int, list[Message]] = {}
    buckets: dict[tuple[int, int, int | None], int] = {}
    for node, item in enumerate(graph.nodes):
        if item.kind is Kind.SEND:
            assert item.peer is not None
            recv = graph.partner[node]
            ends = (item.stage, item.peer)
            link = graph.rank[node] * num_ranks + graph.rank[recv]
            message = Message(node, recv, link, boundary[min(ends), max(ends)])
            outgoing.setdefault(graph.needs[node][0], []).append(message)
        elif item.kind is Kind.REDUCE:
            place = (graph.rank[node], item.stage, item.version)
            buckets[place] = buckets.get(place, 0) + 1
    steps: list[Compute | Channel] = []
    fused: dict[tuple[int, int], int] = {}
    travels: list[Inside] = []
    timed: dict[int, int] = {}
    counted: dict[int, int] = {}
    for node in graph.order:
        item, rank, needs = graph.nodes[node], graph.rank[node], graph.needs[node]
        if item.kind in COMPUTE_KINDS:
            messages = tuple(outgoing.get(node, ()))
            if item.halves:
                first, second = (row[half.kind] + half.stage for half in item.halves)
                duration = len(row) * num_stages + fused.setdefault((first, second), len(fused))
            else:
                duration = row[item.kind] + item.stage
            timed[node] = duration
            steps.append(Compute(node, rank, duration, needs, messages))
        elif item.kind in EXCHANGE_KINDS:
            host = needs[0]
            number = counted[host] = counted.get(host, -1) + 1
            travels.append(Inside(node, host, timed[host], number))
        elif item.kind in CHANNEL_KINDS:
            bucket = -1 if item.bucket is None else item.bucket
            inside = item.kind is Kind.REDUCE and not item.after and bool(needs)
            fraction = (bucket + 1) / buckets.get((rank, item.stage, item.version), 1)
            released_by = max(needs) if inside else -1
            steps.append(Channel(node, rank, item.stage, bucket, released_by, fraction, needs))
    return Walk(tuple(steps), len(graph.nodes), tuple(travels), tuple(fused))
