"""Adds one SEND and one RECV per message, at places that cannot deadlock.

Each message is one event that two ranks share. All compute and message events are put into one
linear order (here: by the time at which the producer ends, in a model where B takes twice F), and
every rank gets its projection of it. The earliest unfinished event then always has both its ends
past everything before it, so it completes; by induction the whole program does, under rendezvous
semantics and without tags. Producer-time order costs nothing at zero latency.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.costs.table import CostTable
from strategies.ir.instruction import MICROBATCH_KINDS, Instruction, Kind
from strategies.ir.program import Program

# Durations that order the events; any positive ones are safe.
_DURATION = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0, Kind.R: 1.0}

_Key = tuple[float, int, int, int]


def add_messages(program: Program, table: CostTable | None = None) -> Program:
    """Lowers a verified compute program; instructions keep their order on each rank.

    Args:
        program: Not lowered.
        table: What its instructions take; None for a model where B takes twice F.
    """
    assert not program.lowered
    end = _end_times(program, table)
    position = {node: place for place, node in enumerate(program.graph.order)}
    placement = program.placement
    events: list[list[tuple[_Key, Instruction]]] = [[] for _ in program.ranks]
    made: dict[tuple[Kind, int, int], int] = {}
    node = 0
    for rank, row in enumerate(program.ranks):
        for place, item in enumerate(row):
            # REDUCE and STEP end with their list neighbour; they follow its SEND.
            turn = 0 if item.kind in MICROBATCH_KINDS else 2
            events[rank].append(((end[node], turn, place, 0), item))
            for part in item.parts if item.kind in MICROBATCH_KINDS else ():
                assert part.microbatch is not None
                kind = Kind.B if part.kind is Kind.I else part.kind
                made[kind, part.stage, part.microbatch] = node
            node += 1
    for boundary in program.boundaries:
        for microbatch in range(program.num_microbatches):
            down = (Kind.F, boundary.source, boundary.target)
            up = (Kind.B, boundary.target, boundary.source)
            for payload, source, target in (down, up):
                source_rank = placement.rank_of(source, microbatch)
                target_rank = placement.rank_of(target, microbatch)
                producer = made.get((payload, source, microbatch))
                if source_rank == target_rank or producer is None:
                    continue
                key = (end[producer], 1, position[producer], target)
                events[source_rank].append(
                    (key, Instruction(Kind.SEND, source, microbatch, payload=payload, peer=target))
                )
                events[target_rank].append(
                    (key, Instruction(Kind.RECV, target, microbatch, payload=payload, peer=source))
                )
    rows = tuple(
        tuple(item for _, item in sorted(row, key=lambda event: event[0])) for row in events
    )
    return replace(program, ranks=rows, lowered=True)


def _end_times(program: Program, table: CostTable | None) -> list[float]:
    graph = program.graph
    hop = 0.0
    if table is not None:
        hops = zip(table.latency, table.occupancy, strict=True)
        hop = max((latency + occupancy for latency, occupancy in hops), default=0.0)
    end = [0.0] * len(graph.nodes)
    free = [0.0] * len(program.ranks)
    for node in graph.order:
        rank, item = graph.rank[node], graph.nodes[node]
        if item.kind not in MICROBATCH_KINDS:
            # A REDUCE must not hold up the list; only its place in it matters here.
            end[node] = free[rank]
            continue
        start = free[rank]
        for need in graph.needs[node]:
            start = max(start, end[need] + (hop if graph.rank[need] != rank else 0.0))
        end[node] = free[rank] = start + _duration(item, table)
    return end


def _duration(item: Instruction, table: CostTable | None) -> float:
    if table is not None:
        return table.of(item)
    return sum(_DURATION[part.kind] for part in item.parts)
