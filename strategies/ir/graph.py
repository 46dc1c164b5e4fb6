"""What each instruction needs, and one order in which all of them can run.

The order is found by walking all ranks at once under RENDEZVOUS semantics: a SEND ends only
together with its RECV. A program that gets through this walk cannot deadlock on any backend that
matches messages in order, whatever it buffers (each message is one event that two ranks share; the
walk is a linear extension of all events, and every rank's list is its projection).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from strategies.errors import DeadlockError, ProgramError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import (
    CHANNEL_KINDS,
    COMPUTE_KINDS,
    EXCHANGE_KINDS,
    GRADIENT_KINDS,
    KINDS,
    MESSAGE_KINDS,
    Kind,
)
from strategies.ir.program import Program

# Which kinds make a payload.
_MAKERS = {
    payload: tuple(kind for kind, facts in KINDS.items() if facts.makes is payload)
    for payload in (Kind.F, Kind.B)
}
# Inside which an exchange of a pass runs.
_HOSTS = {Kind.F: (Kind.F,), Kind.R: (Kind.R,), Kind.B: (Kind.B, Kind.I)}


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
    order: tuple[int, ...]


def build_graph(program: Program) -> Graph:
    """Derives needs and a linear extension.

    Raises:
        ProgramError: An instruction uses what nobody makes, or the lists deadlock.
    """
    graph = build_needs(program)
    return replace(graph, order=_walk(program, graph))


def build_needs(program: Program) -> Graph:
    """The graph without an order: for those who walk it under other rules.

    Raises:
        ProgramError: An instruction uses what nobody makes.
    """
    nodes = tuple(item for row in program.ranks for item in row)
    rank = tuple(r for r, row in enumerate(program.ranks) for _ in row)
    offsets = tuple(accumulate(map(len, program.ranks), initial=0))
    resolver = _Resolver(program, nodes, rank)
    needs = tuple(resolver.needs(node) for node in range(len(nodes)))
    partner = tuple(resolver.partner(node) for node in range(len(nodes)))
    return Graph(nodes, rank, offsets, needs, partner, order=())


class _Resolver:
    """Finds the nodes that each instruction needs, by name."""

    def __init__(
        self, program: Program, nodes: tuple[Instruction, ...], rank: tuple[int, ...]
    ) -> None:
        self._program = program
        self._nodes = nodes
        self._rank = rank
        self._made: dict[tuple[Kind, int, int], int] = {}
        # (kind, payload, stage, peer, microbatch) of SENDs and RECVs.
        self._messages: dict[tuple[object, ...], int] = {}
        # Per (rank, stage, update): what completes its gradient, and its reductions.
        self._last: dict[tuple[int, int, int | None], list[int]] = {}
        self._reduces: dict[tuple[int, int, int | None], list[int]] = {}
        # Per (rank, stage, version): the gather and its user.
        self._gathers: dict[tuple[int, int, int | None], int] = {}
        self._first: dict[tuple[int, int, int | None], int] = {}
        self._losses: dict[int, int] = {}  # by stage
        for number, item in enumerate(nodes):
            kind, stage = item.kind, item.stage
            if kind in MESSAGE_KINDS:
                self._messages[kind, item.payload, stage, item.peer, item.microbatch] = number
            elif item.microbatch is not None:
                for part in item.parts:
                    assert part.microbatch is not None
                    self._made[part.kind, part.stage, part.microbatch] = number
                    if part.kind in GRADIENT_KINDS:
                        place = (rank[number], part.stage, program.update_of(part.microbatch))
                        self._last.setdefault(place, []).append(number)
                    elif part.kind is Kind.F:
                        self._first.setdefault((rank[number], part.stage, part.version), number)
            elif kind is Kind.REDUCE:
                self._reduces.setdefault((rank[number], stage, item.version), []).append(number)
            elif kind is Kind.GATHER:
                self._gathers[rank[number], stage, item.version] = number
            elif kind is Kind.LOSS:
                self._losses[stage] = number
        self._sources: dict[int, list[int]] = {}
        self._targets: dict[int, list[int]] = {}
        for boundary in program.boundaries:
            self._sources.setdefault(boundary.target, []).append(boundary.source)
            self._targets.setdefault(boundary.source, []).append(boundary.target)

    def needs(self, node: int) -> tuple[int, ...]:
        item = self._nodes[node]
        found = [need for half in item.halves for need in self._data(half, node)]
        if not found:
            found = self._data(item, node)
        found += [self._find(item, edge, self._rank[node]) for edge in item.after]
        return tuple(found)

    def _data(self, item: Instruction, node: int) -> list[int]:
        """What the data needs, beyond the ``after`` edges."""
        kind, stage, microbatch = item.kind, item.stage, item.microbatch
        facts = KINDS[kind]
        found: list[int] = []
        if facts.reads:
            found += self._own(item, facts.reads)
        if facts.receives is not None:
            assert microbatch is not None
            neighbours = self._sources if facts.receives is Kind.F else self._targets
            for other in neighbours.get(stage, ()):
                found.append(self._input(item, facts.receives, other, microbatch))
        if facts.makes is Kind.B and stage in self._losses:
            found.append(self._losses[stage])
        if kind is Kind.F:
            assert microbatch is not None
            place = (self._rank[node], stage, item.version)
            if place in self._gathers and self._first[place] == node:
                # Later forwards of the rank follow this one in its list.
                found.append(self._gathers[place])
        elif kind is Kind.SEND:
            assert microbatch is not None
            assert item.payload is not None
            found.append(self._producer(item, item.payload, stage, microbatch))
        elif kind is Kind.RECV:
            found.append(self.partner(node))
        elif kind is Kind.LOSS:
            for number in range(self._program.num_microbatches):
                found.append(self._producer(item, Kind.F, stage, number))
        elif kind in EXCHANGE_KINDS:
            assert item.payload is not None
            found += self._own(item, _HOSTS[item.payload])
        elif kind is Kind.REDUCE:
            found.extend(self._last.get((self._rank[node], stage, item.version), ()))
        elif kind is Kind.STEP:
            update = (self._rank[node], stage, item.version)
            found.extend(self._reduces.get(update, ()) or self._last.get(update, ()))
        return found

    def _own(self, item: Instruction, reads: tuple[Kind, ...]) -> list[int]:
        """The first of these kinds that the instruction's own pair has."""
        stage, microbatch = item.stage, item.microbatch
        assert microbatch is not None
        for maker in reads:
            number = self._made.get((maker, stage, microbatch))
            if number is not None:
                return [number]
        raise _missing(item, f"{stage}{reads[-1].value}{microbatch}")

    def partner(self, node: int) -> int:
        item = self._nodes[node]
        if item.kind not in MESSAGE_KINDS:
            return -1
        other = Kind.RECV if item.kind is Kind.SEND else Kind.SEND
        assert item.payload is not None
        key = (other, item.payload, item.peer, item.stage, item.microbatch)
        if key not in self._messages:
            name = f"{item.peer}{other.value}_{item.payload.value}{item.microbatch}"
            raise ProgramError(f"{item} has no matching {name}: the message never ends.")
        return self._messages[key]

    def _input(self, item: Instruction, payload: Kind, other: int, microbatch: int) -> int:
        """What brings the value of ``other`` to ``item``: its producer, or the RECV."""
        program = self._program
        here = program.placement.rank_of(item.stage, microbatch)
        if not program.lowered or program.placement.rank_of(other, microbatch) == here:
            return self._producer(item, payload, other, microbatch)
        number = self._messages.get((Kind.RECV, payload, item.stage, other, microbatch))
        if number is None:
            raise _missing(item, f"{item.stage}RECV_{payload.value}{microbatch}<{other}")
        return number

    def _producer(self, item: Instruction, payload: Kind, stage: int, microbatch: int) -> int:
        for kind in _MAKERS[payload]:
            number = self._made.get((kind, stage, microbatch))
            if number is not None:
                return number
        raise _missing(item, f"{stage}{payload.value}{microbatch}")

    def _find(self, item: Instruction, edge: Instruction, rank: int) -> int:
        if edge.microbatch is not None and edge.payload is None:
            number = self._made.get((edge.kind, edge.stage, edge.microbatch))
        elif edge.payload is not None:
            key = (edge.kind, edge.payload, edge.stage, edge.peer, edge.microbatch)
            number = self._messages.get(key)
        else:
            # Of several owners' ones, that of the same rank.
            name = (edge.kind, edge.stage, edge.bucket)
            number = min(
                (n for n, i in enumerate(self._nodes) if (i.kind, i.stage, i.bucket) == name),
                key=lambda n: (self._rank[n] != rank, n),
                default=None,
            )
        if number is None:
            raise _missing(item, str(edge))
        return number


def _missing(item: Instruction, name: str) -> ProgramError:
    return ProgramError(f"{item} needs {name}, which no rank runs.")


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
        report = _stuck_report(program, graph, head, done)
        places = zip(head, offsets[:-1], strict=True)
        raise DeadlockError(report, tuple(node - start for node, start in places))
    return tuple(order)


# -------------------------------------------------------------------------------------------- grid
# Programs as grids for error messages: where every rank stands, and what it waits for.


def _stuck_report(program: Program, graph: Graph, head: list[int], done: bytearray) -> str:
    """The message for a deadlock: per rank the step it cannot take, and what it waits for."""
    lines = [f"{program.schedule}: the program deadlocks. Every rank waits for another one:"]
    for rank, node in enumerate(head):
        row = program.ranks[rank]
        place = node - graph.offsets[rank]
        if place == len(row):
            lines.append(f"rank {rank} | ended")
            continue
        text = around(row, place)
        lines.append(f"rank {rank} | {text}  <-- waits for {_cause(node, graph, done)}")
    return "\n".join(lines)


def around(row: Sequence[Instruction], place: int, *, width: int = 4) -> str:
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


# --------------------------------------------------------------------------------------------------
# A program flattened for replay: one tuple per instruction that takes time, in walk order.
#
# Derived once per program, so that replaying it against many cost tables (a search does that
# thousands of times) touches integers only.
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
