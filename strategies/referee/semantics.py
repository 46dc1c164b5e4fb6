"""Whether an order with its messages can run, under what each backend promises of a message.

Frameworks send the same list over different transports, and a list that one of them carries stands
still on another. Five promises cover what is in use:

- ``rendezvous``: a SEND and its RECV end together and hold both ranks until then. What gets through
  runs anywhere; our own lowering asks for nothing less.
- ``buffered``: a SEND ends at once, a RECV holds its rank until the value is there (MPI with small
  messages, gloo with tags).
- ``one_queue``: messages hold nobody; all of a rank wait in one queue and go out in its order
  (NCCL with ``batch_isend_irecv``: one communicator for all ranks).
- ``per_pair``: as before, with one queue for each pair of ranks (NCCL's plain ``isend`` and
  ``irecv``: one communicator per pair, both directions on it).
- ``per_edge``: one queue for each pair of ranks and direction (a communicator of its own for
  activations and for gradients).

A queue's head goes when it faces its other end at the head of the peer's queue; a SEND also waits
for what makes its value. The host does not wait: it queues a whole list while the device is still
at its beginning. Messages that stand
side by side in a list, with no computation between them, may be one group, whose members go at once
(``ncclGroupStart``); or *whole*: none of them before all can, as one kernel that holds them all, so
that a group of two waits for both. Queues know no names: the third message that one rank sends to
another is the third that this one receives from it, whatever either calls it.

None of this has choices: an order runs under a promise if and only if its events can be sorted, and
takes as long as the longest path through them. An event is an instruction, a message with both its
ends (a buffered SEND and its RECV are two), or all groups that go as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from strategies.costs.table import Costs
from strategies.ir.graph import Graph, excerpt
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MESSAGE_KINDS, MICROBATCH_KINDS, Kind
from strategies.ir.program import Program

Semantics = Literal["rendezvous", "buffered", "one_queue", "per_pair", "per_edge"]
SEMANTICS: tuple[Semantics, ...] = get_args(Semantics)
Grouped = bool | Literal["whole"]
_QUEUED: tuple[Semantics, ...] = ("one_queue", "per_pair", "per_edge")


@dataclass(frozen=True, slots=True)
class Crossing:
    """Two ranks that disagree which message comes next.

    Attributes:
        source: Rank that sends.
        target: Rank that receives.
        number: Which message between the two it is, from 0.
        sent: What the one sends as this message.
        received: What the other takes it for.
    """

    source: int
    target: int
    number: int
    sent: Instruction
    received: Instruction

    def __str__(self) -> str:
        return (
            f"message {self.number + 1} from rank {self.source} to rank {self.target} is sent as "
            f"{self.sent} and received as {self.received}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an order.

    Attributes:
        semantics: Under which promise.
        cycle: Instructions each of which waits for the next, the last for the first, in words.
        grid: Where every rank stands, and what it waits for; "" if it can run.
        crossing: Messages that would bring another value than they are taken for.
    """

    semantics: Semantics
    cycle: tuple[str, ...] = ()
    grid: str = ""
    crossing: Crossing | None = None

    @property
    def runs(self) -> bool:
        return self.crossing is None and not self.grid


def judge(program: Program, semantics: Semantics, *, grouped: Grouped = False) -> Verdict:
    """Whether a lowered program runs under one promise; compute-only programs need none of them.

    ``grouped``: whether messages side by side in a list go as one group; ``whole`` if no member
    goes before all can.

    Raises:
        ProgramError: An instruction uses what nobody makes.
    """
    graph = program.dependencies
    if semantics in _QUEUED and (crossing := _crossing(graph)) is not None:
        return Verdict(semantics, crossing=crossing)
    events = _Events(graph, semantics, grouped)
    try:
        events.sorter().prepare()
    except CycleError:
        ended = events.ended()
        return Verdict(semantics, events.ring(ended), events.grid(program, ended))
    return Verdict(semantics)


def _crossing(graph: Graph) -> Crossing | None:
    """The first message that its two ends number differently."""
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    for node, other in enumerate(graph.partner):
        if other < 0:
            continue
        here, there = graph.rank[node], graph.rank[other]
        if graph.nodes[node].kind is Kind.SEND:
            sent[here, there].append(node)
        else:
            received[there, here].append(node)
    for (source, target), nodes in sorted(sent.items()):
        others = received[source, target]
        for number, (node, other) in enumerate(zip(nodes, others, strict=True)):
            if graph.partner[node] != other:
                return Crossing(source, target, number, graph.nodes[node], graph.nodes[other])
    return None


def time_messages(
    program: Program, costs: Costs, semantics: Semantics, *, grouped: Grouped = False
) -> float | None:
    """The step's time with every message where the list has it; None if the order stands still.

    A message begins when its value is there and its turn has come at both ends, and takes what the
    costs say. A queue's next group waits for the last of this one. What stands behind a pending
    RECV in one queue waits with it: this is what an order of messages costs beyond computations.
    """
    events = _Events(program.dependencies, semantics, grouped)
    try:
        order = [*events.sorter().static_order()]
    except CycleError:
        return None
    graph, table = events.graph, costs.table(program)
    hops = {
        (b.source, b.target): hop for b, hop in zip(program.boundaries, table.hops, strict=True)
    }
    took: dict[int, float] = defaultdict(float)
    lag: dict[tuple[int, int], float] = {}  # (SEND, RECV) of buffered messages, each an event
    for node, item in enumerate(graph.nodes):
        if item.kind in MESSAGE_KINDS:
            assert item.peer is not None
            hop = hops[min(item.stage, item.peer), max(item.stage, item.peer)]
            if semantics == "buffered":
                lag[graph.partner[node], node] = hop if item.kind is Kind.RECV else 0.0
            else:
                took[events.of[node]] = max(took[events.of[node]], hop)
        elif item.kind in MICROBATCH_KINDS:
            # Reductions have a channel of their own, and are none of the messages' business.
            took[events.of[node]] = table.of(item)
    ends: dict[int, float] = {}
    for event in order:
        begins = [ends[before] + lag.get((before, event), 0.0) for before in events.before[event]]
        ends[event] = max(begins, default=0.0) + took[event]
    return max(ends.values(), default=0.0)


class _Edge(NamedTuple):
    """A node that waits for another, and why."""

    node: int
    waits_for: int
    why: str


class _Events:
    """What happens at one moment, and what has to happen before.

    Attributes:
        of: The event of each node: the first of its nodes.
        before: Per event, those that end before it can, each with one edge that says why.
    """

    def __init__(self, graph: Graph, semantics: Semantics, grouped: Grouped) -> None:
        self.graph = graph
        self._semantics = semantics
        self._grouped = bool(grouped) and semantics != "buffered"
        groups = [[*step] for rank in range(len(graph.offsets) - 1) for step in self._steps(rank)]
        queues = self._queues(groups)
        self._line = {node: queue for queue in queues for group in queue for node in group}
        together = [group for queue in queues for group in queue] if grouped == "whole" else []
        self.of = self._united(together)
        self.before: dict[int, dict[int, _Edge]] = {event: {} for event in self.of}
        self._add_needs()
        for rank in range(len(graph.offsets) - 1):
            self._add_list([*self._steps(rank)])
        if semantics in _QUEUED:
            for queue in queues:
                self._add_line(queue, "queues behind")

    def sorter(self) -> TopologicalSorter[int]:
        return TopologicalSorter(self.before)

    def _steps(self, rank: int) -> Iterator[list[int]]:
        """The rank's list, messages side by side as one step if they are grouped."""
        step: list[int] = []
        for node in range(*self.graph.offsets[rank : rank + 2]):
            if step and not (self._grouped and self._is_message(step[-1], node)):
                yield step
                step = []
            step.append(node)
        if step:
            yield step

    def _is_message(self, *nodes: int) -> bool:
        return all(self.graph.partner[node] >= 0 for node in nodes)

    def _queues(self, steps: Sequence[list[int]]) -> list[list[list[int]]]:
        """Per queue its groups of messages, in order."""
        queues: dict[tuple[int, int, bool], list[list[int]]] = {}
        if self._semantics == "buffered":
            return []
        for step in steps:
            if not self._is_message(*step):
                continue
            groups: dict[tuple[int, int, bool], list[int]] = {}
            for node in step:
                rank, peer = self.graph.rank[node], self.graph.rank[self.graph.partner[node]]
                sends = self.graph.nodes[node].kind is Kind.SEND
                queue = {
                    "per_pair": (rank, peer, False),
                    "per_edge": (rank, peer, sends),
                }.get(self._semantics, (rank, -1, False))
                groups.setdefault(queue, []).append(node)
            for queue, group in groups.items():
                queues.setdefault(queue, []).append(group)
        return [*queues.values()]

    def _united(self, together: Sequence[list[int]]) -> list[int]:
        """Both ends of a message, and the groups that go as one, are one event."""
        first = [*range(len(self.graph.nodes))]

        def find(node: int) -> int:
            while first[node] != node:
                first[node] = first[first[node]]
                node = first[node]
            return node

        ends = enumerate(self.graph.partner) if self._semantics != "buffered" else ()
        pairs = [(node, other) for node, other in ends if other >= 0]
        for one, other in (*pairs, *(pair for group in together for pair in pairwise(group))):
            low, high = sorted((find(one), find(other)))
            first[high] = low
        return [find(node) for node in range(len(first))]

    def _add(self, node: int, waits_for: int, why: str) -> None:
        here, there = self.of[node], self.of[waits_for]
        self.before[here].setdefault(there, _Edge(node, waits_for, why))

    def _add_needs(self) -> None:
        for node, needs in enumerate(self.graph.needs):
            receives = self.graph.nodes[node].kind is Kind.RECV
            for need in needs:
                if not receives or need != self.graph.partner[node]:
                    self._add(node, need, "needs")
                elif self._semantics == "buffered":
                    self._add(node, need, "waits for")

    def _add_list(self, steps: Sequence[list[int]]) -> None:
        """A host waits at each instruction, or at computations alone where messages are queued."""
        if self._semantics in _QUEUED:
            steps = [step for step in steps if not self._is_message(*step)]
        self._add_line(steps, "stands behind")

    def _add_line(self, groups: Sequence[list[int]], why: str) -> None:
        for earlier, later in pairwise(groups):
            for node in later:
                for before in earlier:
                    self._add(node, before, why)

    # ---------------------------------------------------------------------------- what went wrong

    def ended(self) -> set[int]:
        """The events that come about before all stand still."""
        sorter = self.sorter()
        with suppress(CycleError):  # It goes on as far as it can.
            sorter.prepare()
        ended: set[int] = set()
        while ready := sorter.get_ready():
            ended.update(ready)
            sorter.done(*ready)
        return ended

    def ring(self, ended: set[int]) -> tuple[str, ...]:
        """Those that wait for each other: who for whom, and why."""
        event = next(event for event in self.before if event not in ended)
        seen: dict[int, int] = {}
        edges: list[_Edge] = []
        while event not in seen:
            seen[event] = len(edges)
            edges.append(self._held_up(event, ended))
            event = self.of[edges[-1].waits_for]
        edges = edges[seen[event] :]
        return tuple(map(self._words, (edges[-1], *edges), edges))

    def _held_up(self, event: int, ended: set[int]) -> _Edge:
        """What an event waits for, and where that stands behind others, the first of them."""
        edges = self.before[event]
        left = next(there for there in (event, *edges) if there in edges and there not in ended)
        node, before, why = edges[left]
        first = [before]
        if why == "stands behind":
            first = self._stops(self.graph.rank[before], ended)
        elif why == "queues behind":
            line = (each for group in self._line[before] for each in group)
            first = [each for each in line if self.of[each] not in ended]
        return _Edge(node, first[0], why)

    def _stops(self, rank: int, ended: set[int]) -> list[int]:
        """Where a rank's host stands, and what lies behind that."""
        nodes = range(*self.graph.offsets[rank : rank + 2])
        queued = self._semantics in _QUEUED
        return [
            node
            for node in nodes
            if self.of[node] not in ended and not (queued and self._is_message(node))
        ]

    def _words(self, before: _Edge, edge: _Edge) -> str:
        here, why = before.waits_for, f"{edge.why} {self._name(edge.waits_for)}"
        if edge.node == here:
            return f"{self._place(here)} {why}"
        if edge.node == self.graph.partner[here]:
            return f"{self._place(here)} waits for {self._name(edge.node)}, which {why}"
        *between, last = map(self._name, self._path(here, edge.node))
        with_it = f"{', '.join(between)} and {last}" if between else last
        return f"{self._place(here)} goes with {with_it}, which {why}"

    def _path(self, node: int, other: int) -> list[int]:
        """How two of one event are bound: by way of groups and messages, without the first."""
        back = {node: node}
        for here in (queue := [node]):  # It grows.
            near = [self.graph.partner[here], *next(g for g in self._line[here] if here in g)]
            for there in near:
                if there not in back:
                    back[there] = here
                    queue.append(there)
        path = []
        while other != node:
            path.append(other)
            other = back[other]
        return path[::-1]

    def _name(self, node: int) -> str:
        return str(self.graph.nodes[node])

    def _place(self, node: int) -> str:
        return f"{self._name(node)} on rank {self.graph.rank[node]}"

    def grid(self, program: Program, ended: set[int]) -> str:
        """Per rank: the instructions around the place where it stands, and what it waits for."""
        lines = []
        for rank, row in enumerate(program.ranks):
            start, end = self.graph.offsets[rank : rank + 2]
            if stops := self._stops(rank, ended):
                held_up = self._held_up(self.of[stops[0]], ended)
                own = held_up.node == stops[0]
                cause = self._name(held_up.waits_for if own else self.graph.partner[stops[0]])
                lines.append(
                    f"rank {rank} | {excerpt(row, stops[0] - start)}  <-- waits for {cause}"
                )
                continue
            left = [node for node in range(start, end) if self.of[node] not in ended]
            more = f", but {self._name(left[0])} never arrives" if left else ""
            lines.append(f"rank {rank} | at its end{more}")
        return "\n".join(lines)
