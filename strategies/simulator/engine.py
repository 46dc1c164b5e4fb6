"""One pass over the lists: when every instruction of a program runs.

Model: each rank computes its list in order; an instruction waits for the messages and values it
needs, not for the RECV's place in the list (receives are posted ahead). A message leaves when its
value is there, keeps its link (one per ordered pair of ranks) for ``occupancy`` and arrives
``latency`` later. Each rank has one collective channel beside compute: bucket k of K of a stage's
reduction is released when (k+1)/K of the stage's last backward has passed. STEP waits for its
stage's reductions. A GATHER goes onto the channel when its rank comes to it (in the next step: when
the rank has ended this one), and the stage's first forward waits for it. Tokens of experts travel
inside of computations, which have that in their time; where, is added at the end. With
``transport="rendezvous"`` a SEND and its RECV are one event that holds both ranks.

The order of instructions comes from the program alone; ``run_lists`` only adds times, so it is
deterministic and needs no event queue: one linear extension is walked once. All that times lists
uses it: whole programs, those that have no messages yet (``order_times``), the planner's orders.
Only where ranks share cores, or messages and reductions an interface, how long something takes
depends on what else runs: see ``events``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from strategies.analysis.timeline import Timeline
from strategies.costs.table import Costs, CostTable
from strategies.costs.token_exchange import Span, interleave, spans_alone
from strategies.errors import CostError, ProgramError
from strategies.ir.graph import Compute
from strategies.ir.instruction import exchanges
from strategies.ir.program import Program
from strategies.simulator.events import Item, run_events


@dataclass(frozen=True, slots=True)
class Clocks:
    """When ranks, their channels and their links are free; carries from one step to the next."""

    ranks: tuple[float, ...]
    channels: tuple[float, ...]
    links: tuple[float, ...]  # source rank * P + target rank

    @classmethod
    def at_zero(cls, num_ranks: int) -> Clocks:
        zero = (0.0,) * num_ranks
        return cls(zero, zero, zero * num_ranks)


def simulate(program: Program, costs: Costs, *, cores: float | None = None) -> Timeline:
    """One step of the program, all ranks starting at 0.

    Args:
        program: Lowered.
        costs: What its instructions take.
        cores: How many cores its ranks share; None for one each.

    Raises:
        ProgramError: The program has no messages yet; ``compile_program`` makes ones that have.
        CostError: The costs do not fit the program.
    """
    if not isinstance(program, Program):
        raise ProgramError(
            f"simulate({program!r:.60}, ...): expected a program. Try "
            "simulate(compile_program(pp=4, num_microbatches=8), UniformCosts())."
        )
    if not callable(getattr(costs, "table", None)):
        raise CostError(
            f"simulate(program, {costs!r:.60}): expected costs. Try "
            "simulate(program, UniformCosts(forward=1, backward=2))."
        )
    return unroll(program, costs, steps=1, cores=cores)[0]


def unroll(
    program: Program, costs: Costs, *, steps: int, cores: float | None = None
) -> tuple[Timeline, ...]:
    """``steps`` iterations without a barrier: a rank begins the next step when its own is done."""
    if not program.lowered:
        raise ProgramError(
            "simulate() needs a lowered program, with messages. compile_program() returns one."
        )
    table = costs.table(program)
    spans = _spans(program, table, steps=steps, cores=cores)
    return tuple(_timeline(program, table, start, end) for start, end in spans)


def replay(program: Program, table: CostTable) -> tuple[list[float], list[float]]:
    """Start and end of every node of a lowered program's graph, for searches in a loop."""
    return _spans(program, table, steps=1, cores=None)[0]


def order_times(
    program: Program, durations: Sequence[float], hop: float
) -> tuple[list[float], list[float]]:
    """Start and end of every node of a program without messages, where only compute takes time.

    ``durations`` are as in ``flat_durations``. What one rank hands to another is known there one
    ``hop`` after its end.
    """
    walk, count = program.flat, len(program.graph.nodes)
    start, end, _ = run_lists(
        walk.steps,
        walk.num_nodes,
        durations=durations,
        latency=[hop] * len(program.boundaries),
        clocks=Clocks.at_zero(len(program.ranks)),
    )
    return start[:count], end[:count]


# ------------------------------------------------------------------------------------ the one pass
# Steps are tuples that differ in length.

Sent = tuple[int, int, int, int]
"""Like ``Message``: its SEND, its RECV, source rank * P + target rank, its boundary. As a step it
holds both ranks; in a computation it leaves when that ends."""

ComputeStep = tuple[int, int, int, Sequence[int], Sequence[Sent]]
ChannelStep = tuple[int, int, int, int, int, float, Sequence[int]]
ListStep = ComputeStep | ChannelStep | Sent


def _nothing(stage: int, bucket: int) -> float:
    return 0.0


def run_lists(
    steps: Iterable[ListStep],
    num_nodes: int,
    *,
    durations: Sequence[float],
    latency: Sequence[float],
    occupancy: Sequence[float] = (),
    on_channel: Callable[[int, int], float] = _nothing,
    clocks: Clocks,
) -> tuple[list[float], list[float], Clocks]:
    """Start and end of every node, and when all is free again.

    Args:
        steps: In an order in which all can run, and in list order on every rank and channel.
        num_nodes: A node without a step is there from the beginning.
        durations: What computations take, by their index.
        latency: Per boundary: what a message takes beside its transfer.
        occupancy: Per boundary: how long a message keeps its link; () for no time.
        on_channel: (stage, bucket) -> what that takes on a rank's channel.
        clocks: When all is free.
    """
    timed_links = any(occupancy)
    start = [0.0] * num_nodes
    end = [0.0] * num_nodes
    free = list(clocks.ranks)
    channel = list(clocks.channels)
    links = list(clocks.links)
    for step in steps:
        if len(step) == 5:  # A tuple's length is faster to read than its type.
            node, rank, index, needs, messages = step
            now = free[rank]
            for need in needs:
                if end[need] > now:
                    now = end[need]
            start[node] = now
            now += durations[index]
            end[node] = free[rank] = now
            for send, recv, link, boundary in messages:
                start[send] = start[recv] = now
                sent = now
                if timed_links:
                    if links[link] > sent:
                        start[send] = start[recv] = sent = links[link]
                    sent += occupancy[boundary]
                    links[link] = sent
                end[send] = end[recv] = sent + latency[boundary]
        elif len(step) == 4:
            send, recv, link, boundary = step
            source, target = divmod(link, len(free))
            now = max(free[source], free[target])
            took = (occupancy[boundary] if timed_links else 0.0) + latency[boundary]
            start[send] = start[recv] = now
            end[send] = end[recv] = free[source] = free[target] = now + took
        else:
            node, rank, stage, bucket, released_by, fraction, needs = step
            if released_by >= 0:
                ready = start[released_by]
                ready += fraction * (end[released_by] - ready)
            else:
                ready = max([0.0 if bucket >= 0 else free[rank], *(end[need] for need in needs)])
            now = max(channel[rank], ready)
            start[node] = now
            end[node] = channel[rank] = now + on_channel(stage, bucket)
    return start, end, Clocks(tuple(free), tuple(channel), tuple(links))


def _spans(
    program: Program, table: CostTable, *, steps: int, cores: float | None
) -> list[tuple[list[float], list[float]]]:
    items = _items(program, table)
    durations = flat_durations(table, program.flat.fused)
    if cores is not None and cores >= len(program.ranks):
        cores = None
    if table.one_link or cores is not None:
        return run_events(program, items, table, durations, cores=cores, steps=steps)
    clocks = Clocks.at_zero(len(program.ranks))
    spans = []
    for _ in range(steps):
        start, end, clocks = run_lists(
            items,
            program.flat.num_nodes,
            durations=durations,
            latency=table.latency,
            occupancy=table.occupancy,
            on_channel=table.on_channel,
            clocks=clocks,
        )
        spans.append((start, end))
    return spans


def _items(program: Program, table: CostTable) -> Sequence[Item]:
    """What takes time, with messages as items of their own where a send waits for its receive."""
    walk = program.flat
    if table.transport == "buffered":
        return walk.steps
    items: dict[int, Item] = {}
    for step in walk.steps:
        if isinstance(step, Compute):
            items |= {message.send: message for message in step.messages}
            items[step.node] = Compute(*step[:4], ())
        else:
            items[step.node] = step
    return [items[node] for node in program.graph.order if node in items]


def _exchanged(
    program: Program, table: CostTable, rank: int, times: Iterable[Span]
) -> Iterator[Span]:
    """When tokens travel: in the same places of what they are inside of, however long that took."""
    for item, (start, end) in zip(program.ranks[rank], times, strict=True):
        if count := len(list(exchanges(item, program.exchanges))):
            parts, took = item.parts, [table.of(part) for part in item.parts]
            computes = table.computes(took, [p.stage for p in parts], [p.kind for p in parts])
            alone = took[0], spans_alone(computes[0])
            whole, spans = interleave(*computes) if item.halves else alone
            longer = (end - start) / whole if whole else 0.0
            for begins, ends in [*spans, *[(0.0, 0.0)] * count][:count]:
                yield start + longer * begins, start + longer * ends


def flat_durations(table: CostTable, fused: Iterable[tuple[int, int]] = ()) -> list[float]:
    """The table in the order of ``DURATION_ROWS``: row * S + stage; fused pairs at the end."""
    single, count = table.flat(), len(table.forward)
    return single + [
        table.pair((single[first], single[second]), (first % count, second % count))
        for first, second in fused
    ]


def _timeline(
    program: Program, table: CostTable, start: Sequence[float], end: Sequence[float]
) -> Timeline:
    starts, ends = [], []
    for rank, (low, high) in enumerate(pairwise(program.graph.offsets)):
        times = zip(start[low:high], end[low:high], strict=True)
        inside = [*_exchanged(program, table, rank, times)] if program.exchanges else ()
        starts.append((*start[low:high], *(begun for begun, _ in inside)))
        ends.append((*end[low:high], *(ended for _, ended in inside)))
    return Timeline(
        program,
        tuple(starts),
        tuple(ends),
        table.time_unit,
        "simulated",
        table.stage_input,
    )
