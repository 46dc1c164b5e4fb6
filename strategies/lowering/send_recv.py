"""Adds one SEND and one RECV per message, at places that cannot deadlock.

Each message is one event that two ranks share. All compute and message events are put into one
linear order, and every rank gets its projection of it. The earliest unfinished event then always
has both its ends past everything before it, so it completes; by induction the whole program does,
under rendezvous semantics and without tags.

The order is by time: compute counts when it ends in a simulation with the plan's costs, a message
when its producer ends. That costs nothing at zero latency. Where sends wait for their receives, the
choice of the order is worth more (``rendezvous_order.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from strategies.costs.table import CostTable
from strategies.ir.instruction import BACKWARD_KINDS, MICROBATCH_KINDS, Instruction, Kind
from strategies.ir.program import Program
from strategies.lowering.remote_edges import on_this_rank

# Durations that order the events where no costs are known; any positive ones are safe.
_DURATION = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0, Kind.R: 1.0}


class Message(NamedTuple):
    """A value that crosses from rank to rank.

    Attributes:
        payload: F or B.
        source: Stage that makes it.
        target: Stage that uses it.
        microbatch: Whose.
        producer: Node of the unlowered program's graph.
        consumer: Node of the unlowered program's graph.
    """

    payload: Kind
    source: int
    target: int
    microbatch: int
    producer: int
    consumer: int


def add_messages(program: Program, table: CostTable | None = None) -> Program:
    """Lowers a verified compute program; instructions keep their order on each rank.

    Args:
        program: Not lowered.
        table: What its instructions take; None for a model where B takes twice F.
    """
    end = end_times(program, table)
    return place_messages(program, end, lambda message: end[message.producer])


def place_messages(program: Program, end: list[float], when: Callable[[Message], float]) -> Program:
    """Merges messages into the lists.

    Args:
        program: Not lowered.
        end: Of each node, strictly growing along each rank's compute and along dependencies.
        when: Time of a message, from the end of its producer to before the end of its consumer.
    """
    assert not program.lowered
    position = {node: place for place, node in enumerate(program.graph.order)}
    placement = program.placement
    events: list[list[tuple[tuple[float, int, int, int], Instruction]]] = [
        [] for _ in program.ranks
    ]
    for node, item in enumerate(program.graph.nodes):
        # A REDUCE ends with its list neighbour and follows its SEND; a STEP ends the list.
        turn = 0 if item.kind in MICROBATCH_KINDS else 2
        time = float("inf") if item.kind is Kind.STEP else end[node]
        events[program.graph.rank[node]].append(
            ((time, turn, node, 0), on_this_rank(item, placement))
        )
    for message in messages(program):
        payload, source, target, microbatch = message[:4]
        key = (when(message), 1, position[message.producer], target)
        send = Instruction(Kind.SEND, source, microbatch, payload=payload, peer=target)
        receive = Instruction(Kind.RECV, target, microbatch, payload=payload, peer=source)
        events[placement.rank_of(source, microbatch)].append((key, send))
        events[placement.rank_of(target, microbatch)].append((key, receive))
    rows = tuple(
        tuple(item for _, item in sorted(row, key=lambda event: event[0])) for row in events
    )
    return replace(program, ranks=rows, lowered=True)


def messages(program: Program) -> list[Message]:
    """Everything that has to cross between ranks in an unlowered program."""
    made: dict[tuple[Kind, int, int], int] = {}
    for node, item in enumerate(program.graph.nodes):
        for part in item.parts if item.kind in MICROBATCH_KINDS else ():
            assert part.microbatch is not None
            kind = Kind.B if part.kind in BACKWARD_KINDS else part.kind
            made[kind, part.stage, part.microbatch] = node
    rank_of = program.placement.rank_of
    found = []
    for boundary in program.boundaries:
        for microbatch in range(program.num_microbatches):
            for payload, source, target in (
                (Kind.F, boundary.source, boundary.target),
                (Kind.B, boundary.target, boundary.source),
            ):
                producer = made.get((payload, source, microbatch))
                consumer = made.get((payload, target, microbatch))
                if producer is None or consumer is None:
                    continue
                again = made.get((Kind.R, target, microbatch))
                if again is not None and producer in program.graph.needs[again]:
                    consumer = again  # It waits for the gradient before its backward does.
                if rank_of(source, microbatch) != rank_of(target, microbatch):
                    found.append(Message(payload, source, target, microbatch, producer, consumer))
    return found


def end_times(program: Program, table: CostTable | None) -> list[float]:
    """When each node ends if messages hold up nobody."""
    graph = program.graph
    hop = 0.0
    if table is not None:
        hops = zip(table.latency, table.occupancy, strict=True)
        hop = max((latency + occupancy for latency, occupancy in hops), default=0.0)
    lasts = [_duration(item, table) for item in graph.nodes]
    # An empty stage takes no time, but its messages still go before and after it.
    shortest = 1e-6 * max(lasts, default=1.0)
    end = [0.0] * len(graph.nodes)
    free = [0.0] * len(program.ranks)
    for node in graph.order:
        rank = graph.rank[node]
        if graph.nodes[node].kind not in MICROBATCH_KINDS:
            # A REDUCE must not hold up the list; only its place in it matters here.
            end[node] = free[rank]
            continue
        start = free[rank]
        for need in graph.needs[node]:
            start = max(start, end[need] + (hop if graph.rank[need] != rank else 0.0))
        end[node] = free[rank] = start + max(lasts[node], shortest)
    return end


def _duration(item: Instruction, table: CostTable | None) -> float:
    if item.kind not in MICROBATCH_KINDS:
        return 0.0
    if table is not None:
        return table.of(item)
    return sum(_DURATION[part.kind] for part in item.parts)
