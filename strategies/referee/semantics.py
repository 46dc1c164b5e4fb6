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
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from strategies.costs.table import Costs
from strategies.ir.graph import Graph, around, build_needs
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MESSAGE_KINDS, MICROBATCH_KINDS, Kind
from strategies.ir.program import Program

Semantics = Literal["rendezvous", "buffered", "one_queue", "per_pair", "per_edge"]
SEMANTICS: tuple[Semantics, ...] = get_args(Semantics)
Grouped = bool | Literal["whole"]
_QUEUED: tuple[Semantics, ...] = ("one_queue", "per_pair", "per_edge")

# A rank's queue: its other end, where it has one for each, and whether it is the one for SENDs.
_Queue = tuple[int, int, bool]


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
        order: Nodes in an order in which they end: all of them if it can run.
        heads: Per rank, how many of its instructions it got past.
        crossing: Messages that would bring another value than they are taken for.
        cycle: Instructions each of which waits for the next, the last for the first, in words.
        involved: Nodes of the cycle, or of the crossing.
        grid: Where every rank stands, and what it waits for; "" if it can run.
    """

    semantics: Semantics
    order: tuple[int, ...]
    heads: tuple[int, ...]
    crossing: Crossing | None = None
    cycle: tuple[str, ...] = ()
    involved: tuple[int, ...] = ()
    grid: str = ""

    @property
    def runs(self) -> bool:
        return self.crossing is None and not self.grid


def judge(program: Program, semantics: Semantics, *, grouped: Grouped = False) -> Verdict:
    """Walks a lowered program under one promise; compute-only programs need none of them.

    ``grouped``: whether messages side by side in a list go as one group; ``whole`` if no member
    goes before all can.

    Raises:
        ProgramError: An instruction uses what nobody makes.
    """
    walk = _Walk(program, build_needs(program), semantics, grouped=grouped)
    if semantics in _QUEUED and (found := _crossing(walk.graph)) is not None:
        heads = (0,) * len(program.ranks)
        return Verdict(semantics, (), heads, crossing=found[0], involved=found[1])
    walk.run()
    heads = tuple(
        head - start for head, start in zip(walk.head, walk.graph.offsets[:-1], strict=True)
    )
    if len(walk.order) == len(walk.graph.nodes):
        return Verdict(semantics, tuple(walk.order), heads)
    ring, words = walk.cycle()
    reached = tuple(walk.order)
    return Verdict(semantics, reached, heads, cycle=words, involved=ring, grid=walk.grid())


def _crossing(graph: Graph) -> tuple[Crossing, tuple[int, ...]] | None:
    """The first message that its two ends number differently, and the nodes that tell of it."""
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
                ends = graph.nodes[node], graph.nodes[other]
                told = node, other, graph.partner[node], graph.partner[other]
                return Crossing(source, target, number, *ends), told
    return None


def time_messages(
    program: Program, costs: Costs, semantics: Semantics, *, grouped: Grouped = False
) -> float | None:
    """The step's time with every message where the list has it; None if the order stands still.

    A message begins when its value is there and its turn has come at both ends, and takes what the
    costs say. A queue's next group waits for the last of this one. What stands behind a pending
    RECV in one queue waits with it: this is what an order of messages costs beyond computations.
    """
    walk = _Walk(program, build_needs(program), semantics, grouped=grouped)
    walk.run()
    graph = walk.graph
    if len(walk.order) < len(graph.nodes):
        return None
    table = costs.table(program)
    hops = {
        (b.source, b.target): hop for b, hop in zip(program.boundaries, table.hops, strict=True)
    }
    holds = semantics in ("rendezvous", "buffered")
    ends = [0.0] * len(graph.nodes)
    free = [0.0] * len(program.ranks)
    group_of = {
        node: (queue, place)
        for queue, groups in walk.queues.items()
        for place, group in enumerate(groups)
        for node in group
    }
    group_end: dict[tuple[_Queue, int], float] = defaultdict(float)

    def turn(node: int) -> float:
        """When a message's turn comes at its end."""
        queue, place = group_of[node]
        return group_end[queue, place - 1] if place else 0.0

    for node in walk.order:
        item, rank = graph.nodes[node], graph.rank[node]
        if node in group_of and item.kind is Kind.RECV:
            continue  # Timed with its SEND.
        ready = max((ends[need] for need in graph.needs[node]), default=0.0)
        if item.kind not in MESSAGE_KINDS:
            # Reductions have a channel of their own, and are none of the messages' business.
            took = table.of(item) if item.kind in MICROBATCH_KINDS else 0.0
            ends[node] = free[rank] = max(free[rank], ready) + took
            continue
        assert item.peer is not None
        hop = hops[min(item.stage, item.peer), max(item.stage, item.peer)]
        if semantics == "buffered":
            if item.kind is Kind.SEND:
                ends[node] = free[rank] = max(free[rank], ready)
            else:
                ends[node] = free[rank] = max(free[rank], ready + hop)
            continue
        other = graph.partner[node]
        start = max(ready, turn(node), turn(other))
        if holds:
            start = max(start, free[rank], free[graph.rank[other]])
        ends[node] = ends[other] = start + hop
        for end in (node, other):
            key = group_of[end]
            group_end[key] = max(group_end[key], ends[end], turn(end))
            if holds:
                free[graph.rank[end]] = ends[end]
    return max(ends, default=0.0)


@dataclass(eq=False)
class _Walk:
    """All ranks' lists and queues."""

    program: Program
    graph: Graph
    semantics: Semantics
    grouped: Grouped
    head: list[int] = field(init=False)
    done: bytearray = field(init=False)
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.head = list(self.graph.offsets[:-1])
        self.done = bytearray(len(self.graph.nodes))
        self._waiting: dict[int, list[int]] = defaultdict(list)  # node -> ranks
        self._sends: dict[int, list[int]] = defaultdict(list)  # node -> SENDs of what it makes
        self.queues: dict[_Queue, list[list[int]]] = {}
        self._working: dict[_Queue, int] = {}  # which group of the queue goes next
        self._of: dict[int, _Queue] = {}
        self._holds = self.semantics == "rendezvous"
        if self.semantics != "buffered":
            self._line_up()

    def _line_up(self) -> None:
        """Every message into the queue and group in which it will wait."""
        last, run = -2, -1
        for node, item in enumerate(self.graph.nodes):
            if item.kind not in MESSAGE_KINDS:
                continue
            rank, other = self.graph.rank[node], self.graph.partner[node]
            if node != last + 1 or node == self.graph.offsets[rank]:
                run = node  # The first of those that stand side by side.
            queue = self._queue(rank, self.graph.rank[other], sends=item.kind is Kind.SEND)
            groups = self.queues.setdefault(queue, [])
            if self.grouped and groups and groups[-1][0] >= run:
                groups[-1].append(node)
            else:
                groups.append([node])
            self._of[node] = queue
            self._working[queue] = 0
            last = node
            if item.kind is Kind.SEND:
                for need in self.graph.needs[node]:
                    self._sends[need].append(node)

    def _queue(self, rank: int, peer: int, *, sends: bool) -> _Queue:
        if self.semantics in ("one_queue", "rendezvous"):
            return (rank, -1, False)
        return (rank, peer, sends and self.semantics == "per_edge")

    def run(self) -> None:
        ready = list(range(len(self.program.ranks)))[::-1]
        for groups in self.queues.values():
            self._transfer(groups[0], ready)
        while ready:
            rank = ready.pop()
            while self.head[rank] < self.graph.offsets[rank + 1] and self._passes(
                self.head[rank], ready
            ):
                self.head[rank] += 1

    def _passes(self, node: int, ready: list[int]) -> bool:
        """Whether the rank gets past the head of its list; if not, it is asked again."""
        item, rank = self.graph.nodes[node], self.graph.rank[node]
        if self.done[node]:
            return True
        if node in self._of:
            if not self._holds:
                return True
            self._transfer(self._working_group(node), ready)
            if self.done[node]:
                return True
            self._waiting[node].append(rank)  # The other end comes by when it gets there.
            return False
        missing = self._missing(node)
        if missing is None and item.kind is Kind.RECV and not self.done[self.graph.partner[node]]:
            missing = self.graph.partner[node]
        if missing is not None:
            self._waiting[missing].append(rank)
            return False
        self._end(node, ready)
        return True

    def _missing(self, node: int) -> int | None:
        """The first need, beyond its other end, that has not ended."""
        needs = self.graph.needs[node]
        if self.graph.nodes[node].kind is Kind.RECV:
            needs = needs[1:]  # The first is its SEND.
        return next((need for need in needs if not self.done[need]), None)

    def _end(self, node: int, ready: list[int]) -> None:
        self.done[node] = 1
        self.order.append(node)
        ready.extend(self._waiting.pop(node, ()))
        self._transfer(self._sends.get(node, ()), ready)

    def _working_group(self, node: int) -> list[int]:
        queue = self._of[node]
        return self.queues[queue][self._working[queue]]

    def _can_go(self, node: int) -> bool:
        group = self._working_group(node)
        reached = not self._holds or self.head[self.graph.rank[node]] >= group[0]
        return reached and node in group and self._missing(node) is None

    def _transfer(self, nodes: Iterable[int], ready: list[int]) -> None:
        """Lets these go, those behind them, and so on."""
        tried = list(nodes)
        while tried:
            here = tried.pop()
            other = self.graph.partner[here]
            if self.done[here] or not (self._can_go(here) and self._can_go(other)):
                continue
            together = self._together(here)
            if any(not self._can_go(node) for node in together):
                continue
            for node in together:
                if self.graph.nodes[node].kind is not Kind.SEND:
                    continue
                for end in (node, self.graph.partner[node]):
                    self.done[end] = 1
                    self.order.append(end)
                    ready.extend(self._waiting.pop(end, ()))
            for end in together:
                tried.extend(self._advance(self._of[end]))

    def _together(self, node: int) -> list[int]:
        """What goes at one moment: two ends, or whole groups with those that they face."""
        if self.grouped != "whole":
            return [node, self.graph.partner[node]]
        found = dict.fromkeys(self._working_group(node))
        left = list(found)
        while left:
            other = self.graph.partner[left.pop()]
            new = [each for each in (other, *self._group_of(other)) if each not in found]
            found |= dict.fromkeys(new)
            left += new
        return list(found)

    def _group_of(self, node: int) -> list[int]:
        """The group that is at work where a message waits, if it is one of it."""
        group = self._working_group(node)
        return group if node in group else []

    def _advance(self, queue: _Queue) -> list[int]:
        """The members of the next group, once all of this one have gone."""
        groups = self.queues[queue]
        place = self._working[queue]
        if place + 1 == len(groups) or not all(self.done[node] for node in groups[place]):
            return []
        self._working[queue] = place + 1
        return groups[place + 1]

    # ---------------------------------------------------------------------------- what went wrong

    def cycle(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The ring of those that wait for each other: nodes, and in words."""
        seen: dict[int, int] = {}
        words: list[str] = []
        ring: list[int] = []
        node = next(node for node in range(len(self.done)) if not self.done[node])
        while node not in seen:
            seen[node] = len(words)
            ring.append(node)
            node, how = self._cause(node)
            words.append(f"{how} {self.graph.nodes[node]}")
        return tuple(ring[seen[node] :]), tuple(words[seen[node] :])

    def _cause(self, node: int) -> tuple[int, str]:
        """What a node that has not ended waits for, and how."""
        item, rank = self.graph.nodes[node], self.graph.rank[node]
        here = f"{item} on rank {rank}"
        if node in self._of and not (self._holds and self.head[rank] < self._start(node)):
            return self._message_cause(node, here)
        if self.head[rank] != node:
            return self.head[rank], f"{here} stands behind"
        missing = self._missing(node)
        if missing is not None:
            return missing, f"{here} needs"
        return self.graph.partner[node], f"{here} waits for"

    def _start(self, node: int) -> int:
        """The first of its group."""
        groups = self.queues[self._of[node]]
        return next(group[0] for group in groups if node in group)

    def _message_cause(self, node: int, here: str) -> tuple[int, str]:
        group = self._working_group(node)
        if node not in group:
            return next(entry for entry in group if not self.done[entry]), f"{here} queues behind"
        missing = self._missing(node)
        if missing is not None:
            return missing, f"{here} needs"
        other = self.graph.partner[node]
        group = self._working_group(other)
        there = self.graph.rank[other]
        if self._holds and self.head[there] < group[0]:
            words = f"{here} waits for {self.graph.nodes[other]} on rank {there}, which is behind"
            return self.head[there], words
        if other not in group:
            before = next(entry for entry in group if not self.done[entry])
            return before, f"{here} waits for {self.graph.nodes[other]}, which queues behind"
        if self.grouped == "whole":
            held = next((each for each in self._together(node) if not self._can_go(each)), other)
            if held not in (node, other):
                return held, f"{here} goes with"
        return other, f"{here} waits for"

    def grid(self) -> str:
        """Per rank: the instructions around the place where it stands, and what it waits for."""
        lines = []
        for rank, node in enumerate(self.head):
            row = self.program.ranks[rank]
            start, end = self.graph.offsets[rank : rank + 2]
            if node == end:
                left = next((entry for entry in range(start, end) if not self.done[entry]), None)
                more = "" if left is None else f", but {self.graph.nodes[left]} never arrives"
                lines.append(f"rank {rank} | at its end{more}")
                continue
            cause = self.graph.nodes[self._cause(node)[0]]
            lines.append(f"rank {rank} | {around(row, node - start)}  <-- waits for {cause}")
        return "\n".join(lines)
