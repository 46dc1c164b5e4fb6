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
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, KINDS, MICROBATCH_KINDS, Kind
from strategies.ir.placement import Placement
from strategies.ir.program import Program
from strategies.simulator.engine import compute_times


class Message(NamedTuple):
    """A value that crosses from rank to rank."""

    payload: Kind  # F or B
    source: int  # stage that makes it
    target: int  # stage that uses it
    microbatch: int
    producer: int  # nodes of the unlowered program's graph
    consumer: int


def add_messages(program: Program, table: CostTable | None = None) -> Program:
    """Lowers a verified compute program; instructions keep their order on each rank.

    Without a table B takes twice F.
    """
    end = end_times(program, table)
    return place_messages(program, end, lambda message: end[message.producer])


def place_messages(program: Program, end: list[float], when: Callable[[Message], float]) -> Program:
    """Merges messages into the lists.

    Ends grow strictly along each rank's compute and along dependencies; a message's time lies from
    the end of its producer to before the end of its consumer.
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
            made[KINDS[part.kind].makes or part.kind, part.stage, part.microbatch] = node
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
    hop = 0.0 if table is None else max(table.hops, default=0.0)
    lasts = [_duration(item, table) for item in graph.nodes]
    # An empty stage takes no time, but its messages still go before and after it.
    shortest = 1e-6 * max(lasts, default=1.0)
    # A REDUCE must not hold up the list; only its place in it matters here.
    durations, arrivals = [], []
    for item, last, needs in zip(graph.nodes, lasts, graph.needs, strict=True):
        timed = item.kind in MICROBATCH_KINDS
        durations.append(max(last, shortest) if timed else 0.0)
        arrivals.append([(need, hop) for need in needs] if timed else [])
    return compute_times(program, durations, arrivals)[1]


def _duration(item: Instruction, table: CostTable | None) -> float:
    if item.kind not in MICROBATCH_KINDS:
        return 0.0
    if table is not None:
        return table.of(item)
    # Orders the events where no costs are known; any positive durations are safe.
    return float(sum(len(KINDS[part.kind].work) for part in item.parts))


# ------------------------------------------------------------------------------------ remote edges
# Edges to instructions of other ranks become edges to the messages that tell of them.
#
# A rank sees what it computes itself and what it receives. An R that waits for its gradient names
# the backward that makes it; once there are messages it names the RECV that brings it.


def on_this_rank(item: Instruction, placement: Placement) -> Instruction:
    """An R with its edges to other ranks' backwards as edges to its own rank's RECVs."""
    if item.kind is not Kind.R or not item.after:
        return item
    return replace(item, after=tuple(_seen(item, edge, placement) for edge in item.after))


def _seen(item: Instruction, edge: Instruction, placement: Placement) -> Instruction:
    here, there = item.microbatch, edge.microbatch
    if edge.kind not in BACKWARD_KINDS or here is None or there != here:
        return edge
    if placement.rank_of(edge.stage, here) == placement.rank_of(item.stage, here):
        return edge
    return Instruction(Kind.RECV, item.stage, here, payload=Kind.B, peer=edge.stage)


# ----------------------------------------------------------------------------------------- release
# When a sent buffer may go: the point from which its send must have ended.
#
# Waiting for a send inline stalls the sender until its peer has posted the receive. But once a rank
# has received something that its peer sent after consuming the message, the send has ended, and
# waiting for it returns at once. This is read off the lists, so that the runtime polls nothing.


def release_points(program: Program, rank: int) -> dict[int, tuple[Instruction, ...]]:
    """For rank's list: after which place which SENDs are known to have ended.

    Place of a RECV's consumer-side arrival -> SENDs of this rank that its arrival proves ended.
    SENDs that nothing proves within the iteration are in no entry; they end with the next one.
    """
    placement = program.placement
    row = program.ranks[rank]
    place_of = {_message(item): place for place, item in enumerate(row) if item.kind is Kind.RECV}
    peers = {
        placement.rank_of(item.peer, item.microbatch)
        for item in row
        if item.kind is Kind.SEND and item.peer is not None and item.microbatch is not None
    }
    points: dict[int, list[Instruction]] = {}
    for peer in peers:
        # Walk the peer's list backwards, remembering its next SEND to this rank.
        proof: int | None = None
        proofs: dict[tuple[object, ...], int | None] = {}
        for item in reversed(program.ranks[peer]):
            if item.kind is Kind.SEND and _message(item) in place_of:
                proof = place_of[_message(item)]
            elif item.kind is Kind.RECV:
                # Posted at the latest at this place, hence before the later SEND.
                proofs[_message(item)] = proof
        for item in row:
            point = proofs.get(_message(item)) if item.kind is Kind.SEND else None
            if point is not None:
                points.setdefault(point, []).append(item)
    return {place: tuple(items) for place, items in points.items()}


def _message(item: Instruction) -> tuple[object, ...]:
    """One name for both ends of a message."""
    ends = (item.stage, item.peer) if item.kind is Kind.SEND else (item.peer, item.stage)
    return (item.payload, *ends, item.microbatch)
