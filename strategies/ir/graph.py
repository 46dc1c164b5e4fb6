"""What each instruction needs (``values``), and one order in which all of them can run.

The order is found by walking all ranks at once under RENDEZVOUS semantics: a SEND ends only
together with its RECV. A program that gets through this walk cannot deadlock on any backend that
matches messages in order, whatever it buffers (each message is one event that two ranks share; the
walk is a linear extension of all events, and every rank's list is its projection).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from strategies.errors import DeadlockError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, CHANNEL_KINDS, COMPUTE_KINDS, KINDS, Kind
from strategies.ir.program import Program


@dataclass(frozen=True, slots=True)
class Graph:
    """The dependency graph of a program; nodes are numbered rank by rank.

    Attributes:
        nodes: All instructions, rank 0's list first.
        rank: Rank of each node.
        offsets: Number of the first node of each rank, and the total at the end.
        needs: Nodes that must have ended before each node, list order not included.
        partner: For SEND its RECV and the other way round, -1 otherwise.
        order: One linear extension of lists and needs; a RECV directly follows its SEND.
    """

    nodes: tuple[Instruction, ...]
    rank: tuple[int, ...]
    offsets: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    partner: tuple[int, ...]
    order: tuple[int, ...] = ()

    def place(self, node: int) -> tuple[int, int]:
        """Rank, and place in its list."""
        return self.rank[node], node - self.offsets[self.rank[node]]

    def late_needs(self, node: int) -> Iterator[int]:
        """What a node needs and its own list has behind it: it can never begin."""
        end = self.offsets[self.rank[node] + 1]
        return (need for need in self.needs[node] if node < need < end)


def ordered(program: Program) -> Graph:
    """The program's dependencies with a linear extension."""
    graph = program.dependencies
    return replace(graph, order=_walk(program, graph))


def _walk(program: Program, graph: Graph) -> tuple[int, ...]:
    nodes, rank, offsets = graph.nodes, graph.rank, graph.offsets
    needs, partner = graph.needs, graph.partner
    head = list(offsets[:-1])
    done = bytearray(len(nodes))
    waiting: dict[int, list[int]] = {}
    order: list[int] = []
    ready = list(range(len(program.ranks)))[::-1]
    while ready:
        here = ready.pop()
        while head[here] < offsets[here + 1]:
            node = head[here]
            other = partner[node]
            wanted = needs[node]
            send = node
            if other >= 0:
                if nodes[node].kind is Kind.RECV:
                    send = other
                # A RECV's first need is its SEND, which ends with it.
                wanted = needs[send] + needs[partner[send]][1:]
            missing = next((need for need in wanted if not done[need]), None)
            if missing is not None:
                held = waiting.setdefault(missing, [])
                if here not in held:  # else a rank comes by ever more often: quadratic in messages
                    held.append(here)
                break
            ended = [node]
            if other >= 0:
                peer = rank[other]
                if head[peer] != other or peer == here:
                    break  # The peer comes by when it gets there and finds this end waiting.
                ended = [send, partner[send]]
                head[peer] += 1
                ready.append(peer)
            head[here] += 1
            order.extend(ended)
            for number in ended:
                done[number] = 1
                ready.extend(waiting.pop(number, ()))
    if len(order) < len(nodes):
        raise _deadlock(program, graph, head, done)
    return tuple(order)


# -------------------------------------------------------------------------------------------- grid
# Programs as grids for error messages: where every rank stands, and what it waits for.


def _deadlock(program: Program, graph: Graph, head: list[int], done: bytearray) -> DeadlockError:
    """Per rank the step it cannot take, and what it waits for; first a list that waits for itself.

    Else the first that stands still.
    """
    stuck = [node for node, end in zip(head, graph.offsets[1:], strict=True) if node < end]
    late = ((node, need) for node in stuck for need in graph.late_needs(node))
    node, need = next(late, (stuck[0], -1))
    begun = f"{program.schedule}: {graph.nodes[node]} on rank {graph.rank[node]}"
    why = "never begins" if need < 0 else f"stands before {graph.nodes[need]}, which it needs"
    lines = [f"{begun} {why}: the program deadlocks."]
    for rank, row in enumerate(program.ranks):
        text = "ended"
        if head[rank] < graph.offsets[rank + 1]:
            text = excerpt(row, head[rank] - graph.offsets[rank])
            text += f"  <-- waits for {_cause(head[rank], graph, done)}"
        lines.append(f"rank {rank} | {text}")
    return DeadlockError("\n".join(lines), place=graph.place(node))


def excerpt(row: Sequence[Instruction], place: int, *, width: int = 4) -> str:
    """The instructions next to one of a list, and itself in brackets."""
    before = [str(item) for item in row[max(0, place - width) : place]]
    after = [str(item) for item in row[place + 1 : place + 1 + width]]
    dots = ["..."] if place > width else []
    more = ["..."] if place + 1 + width < len(row) else []
    return " ".join([*dots, *before, f"[{row[place]}]", *after, *more])


def _cause(node: int, graph: Graph, done: bytearray) -> str:
    missing = next((need for need in graph.needs[node] if not done[need]), graph.partner[node])
    if missing < 0:
        return "nothing"
    item = graph.nodes[missing]
    return f"step {item} to be posted" if item.kind is Kind.RECV else f"step {item}"


# --------------------------------------------------------------------------------------- transfers


class Transfer(NamedTuple):
    """A value that one rank makes and another one uses."""

    payload: Kind  # F or B
    source: int  # stage that makes it
    target: int  # stage that uses it
    microbatch: int
    producer: int  # nodes of the graph
    consumer: int


_TARGET = attrgetter("target")


def find_transfers(program: Program) -> list[Transfer]:
    """All of a program that has no messages yet."""
    graph = program.graph
    rank, needs = graph.rank, graph.needs
    made: dict[Kind, dict[tuple[int, int | None], int]] = {kind: {} for kind in Kind}
    for node, item in enumerate(graph.nodes):
        for part in item.halves or (item,):
            made[part.kind][part.stage, part.microbatch] = node
    forward, recompute = made[Kind.F], made[Kind.R]
    backward = {pair: node for kind in BACKWARD_KINDS for pair, node in made[kind].items()}
    found = []
    for source, target in ((b.source, b.target) for b in program.boundaries):
        for number in range(program.num_microbatches):
            above, below = forward.get((source, number)), forward.get((target, number))
            if above is None or below is None or rank[above] == rank[below]:
                continue
            found.append(Transfer(Kind.F, source, target, number, above, below))
            above, below = backward.get((source, number)), backward.get((target, number))
            if above is None or below is None:
                continue
            early = recompute.get((source, number), above)
            if early != above and below in needs[early]:
                above = early  # It waits for the gradient before its backward does.
            found.append(Transfer(Kind.B, target, source, number, below, above))
    return found


# --------------------------------------------------------------------------------------------------
# A program flattened for replay: one tuple per instruction that takes time, in walk order.
#
# Derived once per program, so that replaying it against many cost tables (a search does that
# thousands of times) touches integers only.
# Rows of a flat duration table: row * S + stage.
DURATION_ROWS: tuple[Kind, ...] = tuple(
    kind for kind in KINDS if kind in COMPUTE_KINDS and kind is not Kind.OVERLAP
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


class FlatProgram(NamedTuple):
    """Instructions in one linear extension, messages attached to their producers.

    Messages of a program that has none yet are numbered behind the nodes of its graph.
    """

    steps: tuple[Compute | Channel, ...]
    num_nodes: int
    fused: tuple[tuple[int, int], ...]  # rows after ``DURATION_ROWS``: indices of both halves


def flatten_program(program: Program) -> FlatProgram:
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
    num_nodes = len(graph.nodes)
    arriving: dict[int, list[int]] = {}
    if not program.lowered:
        # In the order in which lowering lets the messages of one producer leave.
        for _, source, target, _, producer, consumer in sorted(program.transfers, key=_TARGET):
            link = graph.rank[producer] * num_ranks + graph.rank[consumer]
            line = boundary[min(source, target), max(source, target)]
            outgoing.setdefault(producer, []).append(Message(num_nodes, num_nodes, link, line))
            arriving.setdefault(consumer, []).append(num_nodes)
            num_nodes += 1
    steps: list[Compute | Channel] = []
    fused: dict[tuple[int, int], int] = {}
    for node in graph.order:
        item, rank, needs = graph.nodes[node], graph.rank[node], graph.needs[node]
        if item.kind in COMPUTE_KINDS:
            messages = tuple(outgoing.get(node, ()))
            needs = (*needs, *arriving.get(node, ()))
            if item.halves:
                first, second = (row[half.kind] + half.stage for half in item.halves)
                duration = len(row) * num_stages + fused.setdefault((first, second), len(fused))
            else:
                duration = row[item.kind] + item.stage
            steps.append(Compute(node, rank, duration, needs, messages))
        elif item.kind in CHANNEL_KINDS:
            bucket = -1 if item.bucket is None else item.bucket
            inside = item.kind is Kind.REDUCE and not item.after and bool(needs)
            fraction = (bucket + 1) / buckets.get((rank, item.stage, item.version), 1)
            released_by = max(needs) if inside else -1
            steps.append(Channel(node, rank, item.stage, bucket, released_by, fraction, needs))
    return FlatProgram(tuple(steps), num_nodes, tuple(fused))
