"""Adds one SEND and one RECV per message, at places that cannot deadlock.

Each message is one event that two ranks share. All compute and message events are put into one
linear order, and every rank gets its projection of it. The earliest unfinished event then always
has both its ends past everything before it, so it completes; by induction the whole program does,
under rendezvous semantics and without tags.

The order is by time: compute counts when it ends in a simulation with the plan's costs, a message
when its producer ends. That costs nothing at zero latency. Where sends wait for their receives, the
choice of the order is worth more (below).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter

from strategies.costs.table import CostTable
from strategies.errors import ProgramError
from strategies.ir.graph import DURATION_ROWS, Transfer
from strategies.ir.instruction import Instruction, receiving, sending
from strategies.ir.kinds import BACKWARD_KINDS, KINDS, MICROBATCH_KINDS, Kind
from strategies.ir.program import Placement, Program
from strategies.simulator.engine import flat_durations, order_times, replay


def add_messages(program: Program, table: CostTable | None = None) -> Program:
    """Lowers a verified compute program; instructions keep their order on each rank.

    Without a table B takes twice F.
    """
    if program.updates is not None:
        end, size = _even_times(program), program.updates.per_step

        def leaves(message: Transfer) -> float:
            """When it is made, but not before the step of the training loop that uses it."""
            made, number, stage = end[message.producer], message.microbatch, message.target
            forwards = message.payload is Kind.F
            newest = number if forwards else number + program.placement.num_stages - 1 - stage
            entrance = 2 * (newest // size * size) + stage  # of the step's batch, where it is used
            # Activations leave behind the updates of a batch, so its first RECV is behind them.
            return max(made + 0.5, entrance - 0.5) if forwards else max(made, entrance)

        return place_messages(program, end, leaves)
    end = end_times(program, table)
    return place_messages(program, end, lambda message: end[message.producer])


_KEY = itemgetter(0)


def place_messages(
    program: Program, end: list[float], when: Callable[[Transfer], float]
) -> Program:
    """Merges messages into the lists.

    Ends grow strictly along each rank's compute and along dependencies; a message's time lies from
    the end of its producer to before the end of its consumer.
    """
    assert not program.lowered
    graph, placement = program.graph, program.placement
    position = [0] * len(graph.nodes)
    for place, node in enumerate(graph.order):
        position[node] = place
    # Messages of the halves of one pair may be equal: they stay in the order of the program's.
    events: list[list[tuple[tuple[float, int, int, int], Instruction]]] = [
        [] for _ in program.ranks
    ]
    node = 0
    for rank, row in enumerate(program.ranks):
        time = 0.0
        for item in row:
            # A REDUCE follows its list neighbour and that one's SEND; at a flush a STEP ends the
            # list.
            turn = 0 if item.kind in MICROBATCH_KINDS else 2
            if item.kind is Kind.STEP and program.updates is None:
                time = float("inf")
            elif not turn:
                time = end[node]
            events[rank].append(((time, turn, node, 0), localize_edges(item, placement)))
            node += 1
    for transfer in program.transfers:
        payload, source, target, microbatch, producer, consumer = transfer
        key = (when(transfer), 1, position[producer], target)
        here, there = graph.rank[producer], graph.rank[consumer]
        events[here].append((key, sending(source, microbatch, payload, target)))
        events[there].append((key, receiving(target, microbatch, payload, source)))
    rows = tuple(tuple(item for _, item in sorted(row, key=_KEY)) for row in events)
    return replace(program, ranks=rows, lowered=True)


def end_times(program: Program, table: CostTable | None) -> list[float]:
    """When each node ends if no rank waits for a message's link."""
    fused = program.flat.fused
    if table is not None:
        durations, hop = flat_durations(table, fused), max(table.hops, default=0.0)
    else:
        # Orders the events where no costs are known; any positive durations are safe.
        works, hop = [float(len(KINDS[kind].work)) for kind in DURATION_ROWS], 0.0
        durations = [work for work in works for _ in range(program.placement.num_stages)]
        durations += [durations[first] + durations[second] for first, second in fused]
    # An empty stage takes no time, but its messages still go before and after it.
    shortest = 1e-6 * max(durations, default=1.0)
    return order_times(program, [max(each, shortest) for each in durations], hop)[1]


def _even_times(program: Program) -> list[float]:
    """Ends that move with the microbatch, so that the lists of all steps of a stream repeat.

    F of microbatch g on stage s is at 2g + s, its B at 2g + 2P - 1 - s: 1F1B without a flush. What
    else there is follows its list neighbour.

    Raises:
        ProgramError: A rank has another order.
    """
    depth, ends = 2 * program.placement.num_stages - 1, []
    for rank, row in enumerate(program.ranks):
        time = 0
        for item in row:
            before = time
            if item.kind is Kind.F:
                time = 2 * (item.microbatch or 0) + item.stage
            elif item.kind in BACKWARD_KINDS or item.kind is Kind.R:
                time = 2 * (item.microbatch or 0) + depth - item.stage
            if time < before:
                raise ProgramError(
                    f"{program.schedule}: rank {rank} does not run in the order of 1F1B, F of "
                    "microbatch g and then B of microbatch g - (pp - 1 - rank), which is the only "
                    "one that is cut into steps without a flush."
                )
            ends.append(float(time))
    return ends


# ------------------------------------------------------------------------------------ remote edges
# Edges to instructions of other ranks become edges to the messages that tell of them.
#
# A rank sees what it computes itself and what it receives. An R that waits for its gradient names
# the backward that makes it; once there are messages it names the RECV that brings it.


def localize_edges(item: Instruction, placement: Placement) -> Instruction:
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


# --------------------------------------------------------------------------------------------------
# Orders messages for backends where a send waits for its receive and holds both ranks.
#
# Every linear extension of compute and messages is safe; they differ in time. A
# message right behind its producer makes a busy receiver hold up the sender, one right before its
# use makes the receiver wait for a sender that computes. So the extension is chosen by simulated
# arrival times. One walk keeps all ranks' clocks and takes, again and again, the event that can
# start first; a message goes before a compute that could start earlier by less than ``patience`` if
# its receiver uses it within the next ``ahead`` instructions. A few such walks and producer-time
# order are simulated, the fastest is taken: the result is never slower in the simulation, and as
# safe.
# Patience in mean durations of an instruction, and how many instructions ahead.
_WALKS = tuple((patience, ahead) for patience in (0.0, 0.3, 0.6, 1.1) for ahead in (1, 2, 4))


def order_for_rendezvous(program: Program, table: CostTable) -> Program:
    """The fastest lowering found for a table whose sends wait for their receives."""
    end = end_times(program, table)
    best = place_messages(program, end, lambda message: end[message.producer])
    shortest = _makespan(best, table)
    tried = set()
    for patience, ahead in _WALKS:
        places, when = _Walk(program, table, patience, ahead).run()
        if tuple(when.values()) in tried:
            continue
        tried.add(tuple(when.values()))
        candidate = place_messages(program, places, when.__getitem__)
        makespan = _makespan(candidate, table)
        if makespan < shortest * (1 - 1e-9):
            best, shortest = candidate, makespan
    return best


def _makespan(program: Program, table: CostTable) -> float:
    return max(replay(program, table)[1], default=0.0)


class _Walk:
    """All ranks' clocks, and the events that may come next."""

    def __init__(self, program: Program, table: CostTable, patience: float, ahead: int) -> None:
        graph = program.graph
        self._graph = graph
        self._table = table
        self._rows: list[list[int]] = [[] for _ in program.ranks]
        for node, item in enumerate(graph.nodes):
            if item.kind in MICROBATCH_KINDS:
                self._rows[graph.rank[node]].append(node)
        self._turn = {node: turn for row in self._rows for turn, node in enumerate(row)}
        durations = [table.of(graph.nodes[node]) for node in self._turn]
        self._patience = patience * sum(durations) / max(1, len(durations))
        self._ahead = ahead
        self._next = [0] * len(self._rows)
        self._free = [0.0] * len(self._rows)
        self._made: dict[int, float] = {}  # compute node -> end
        self._outgoing: dict[int, list[Transfer]] = defaultdict(list)
        self._missing: dict[int, int] = defaultdict(int)  # node -> messages not arrived
        self._hop = {
            frozenset((b.source, b.target)): hop
            for b, hop in zip(program.boundaries, table.hops, strict=True)
        }
        for message in program.transfers:
            self._outgoing[message.producer].append(message)
            self._missing[message.consumer] += 1
        self._pending: list[Transfer] = []

    def run(self) -> tuple[list[float], dict[Transfer, float]]:
        """Place of every node and of every message in one order."""
        count = 0
        places = [-1.0] * len(self._graph.nodes)
        when: dict[Transfer, float] = {}
        while any(turn < len(row) for turn, row in zip(self._next, self._rows, strict=True)):
            rank, start = min(self._ready(), key=lambda entry: entry[1], default=(-1, 0.0))
            message, at = self._urgent(rank, start)
            count += 1
            if message is not None:
                self._pending.remove(message)
                self._missing[message.consumer] -= 1
                ended = at + self._hop[frozenset((message.source, message.target))]
                for node in (message.producer, message.consumer):
                    self._free[self._graph.rank[node]] = ended
                when[message] = count
                continue
            node = self._rows[rank][self._next[rank]]
            self._next[rank] += 1
            self._free[rank] = start + self._table.of(self._graph.nodes[node])
            self._made[node] = self._free[rank]
            self._pending += self._outgoing[node]
            places[node] = count
        return places, when

    def _ready(self) -> list[tuple[int, float]]:
        """(rank, start) of computes that need nothing more."""
        found = []
        for rank, row in enumerate(self._rows):
            if self._next[rank] < len(row):
                node = row[self._next[rank]]
                if not self._missing[node] and all(
                    need in self._made for need in self._graph.needs[node] if need in self._turn
                ):
                    found.append((rank, self._free[rank]))
        return found

    def _urgent(self, rank: int, start: float) -> tuple[Transfer | None, float]:
        """The message to take before that compute, if any, and its start."""
        best: Transfer | None = None
        best_at = 0.0
        graph, limit = self._graph, start if rank >= 0 else float("inf")
        for message in self._pending:
            source, target = graph.rank[message.producer], graph.rank[message.consumer]
            at = max(self._free[source], self._free[target], self._made[message.producer])
            distance = self._turn[message.consumer] - self._next[target]
            slack = self._patience if distance < self._ahead and rank in (source, target) else 0.0
            if at <= limit + slack and (best is None or at < best_at):
                best, best_at = message, at
        return best, best_at
