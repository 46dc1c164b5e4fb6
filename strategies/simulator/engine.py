"""Replays a lowered program against a cost table.

Model: each rank computes its list in order; an instruction waits for the messages and values it
needs, not for the RECV's place in the list (receives are posted ahead). A message leaves when its
value is there, keeps its link (one per ordered pair of ranks) for ``occupancy`` and arrives
``latency`` later. Each rank has one collective channel beside compute: bucket k of K of a stage's
reduction is released when (k+1)/K of the stage's last backward has passed. STEP waits for its
stage's reductions. A GATHER goes onto the channel when its rank comes to it (in the next step: when
the rank has ended this one), and the stage's first forward waits for it. With
``transport="rendezvous"`` a SEND and its RECV are one event that holds both ranks. Where messages
and reductions share an interface (``one_link``), see the file of that name.

The order of instructions comes from the program alone; the engine only adds times, so it is
deterministic and needs no event queue: the program's own linear extension is walked once. Only
where ranks share cores, what is next depends on what runs: see ``shared_cores``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from strategies.analysis.timeline import Timeline
from strategies.costs.table import Costs, CostTable
from strategies.errors import ProgramError
from strategies.ir.program import Program
from strategies.ir.walk import Channel, Compute
from strategies.simulator.events import OneLink, run_shared


@dataclass(frozen=True, slots=True)
class Clocks:
    """When ranks, their channels and their links are free; carries from one step to the next."""

    ranks: tuple[float, ...]
    channels: tuple[float, ...]
    links: tuple[float, ...]  # source rank * P + target rank


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
    if cores is not None and cores < len(program.ranks):
        durations = _flat_durations(program, table)
        spans = run_shared(program, table, durations, cores=cores, steps=steps)
        return tuple(_timeline(program, table, start, end) for start, end in spans)
    clocks = _at_zero(program)
    timelines = []
    for _ in range(steps):
        start, end, clocks = _run(program, table, clocks)
        timelines.append(_timeline(program, table, start, end))
    return tuple(timelines)


def replay(program: Program, table: CostTable) -> tuple[list[float], list[float]]:
    """Start and end of every node of a lowered program's graph, for searches in a loop."""
    start, end, _ = _run(program, table, _at_zero(program))
    return start, end


def _at_zero(program: Program) -> Clocks:
    zero = (0.0,) * len(program.ranks)
    return Clocks(zero, zero, zero * len(program.ranks))


def _run(
    program: Program, table: CostTable, clocks: Clocks
) -> tuple[list[float], list[float], Clocks]:
    if table.one_link:
        return _run_one_link(program, table, clocks)
    run = _run_rendezvous if table.transport == "rendezvous" else _run_buffered
    return run(program, table, clocks)


def _timeline(
    program: Program, table: CostTable, start: Sequence[float], end: Sequence[float]
) -> Timeline:
    offsets = program.graph.offsets
    spans = list(pairwise(offsets))
    return Timeline(
        program,
        tuple(tuple(start[low:high]) for low, high in spans),
        tuple(tuple(end[low:high]) for low, high in spans),
        table.time_unit,
        "simulated",
        table.stage_input,
    )


def _flat_durations(program: Program, table: CostTable) -> list[float]:
    """The table in the order of ``DURATION_ROWS``: row * S + stage; fused pairs at the end."""
    single = table.flat()
    pairs = program.walk.fused
    return single + [table.fused * (single[first] + single[second]) for first, second in pairs]


def _run_one_link(
    program: Program, table: CostTable, clocks: Clocks
) -> tuple[list[float], list[float], Clocks]:
    run = OneLink(
        program,
        table,
        _flat_durations(program, table),
        ranks=clocks.ranks,
        channels=clocks.channels,
        links=clocks.links,
    )
    return run.start, run.end, Clocks(tuple(run.ranks), tuple(run.channels), tuple(run.links))


def _run_buffered(
    program: Program, table: CostTable, clocks: Clocks
) -> tuple[list[float], list[float], Clocks]:
    walk = program.walk
    durations = _flat_durations(program, table)
    latency, occupancy = table.latency, table.occupancy
    timed_links = any(occupancy)
    start = [0.0] * walk.num_nodes
    end = [0.0] * walk.num_nodes
    free = list(clocks.ranks)
    channel = list(clocks.channels)
    links = list(clocks.links)
    for step in walk.steps:
        if len(step) == 5:  # Compute; a tuple unpacks faster than it is asked for its type.
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
        else:
            node, rank, stage, bucket, released_by, fraction, needs = step
            if released_by >= 0:
                ready = start[released_by]
                ready += fraction * (end[released_by] - ready)
            else:
                ready = max([0.0 if bucket >= 0 else free[rank], *(end[need] for need in needs)])
            now = max(channel[rank], ready)
            start[node] = now
            end[node] = channel[rank] = now + table.on_channel(stage, bucket)
    return start, end, Clocks(tuple(free), tuple(channel), tuple(links))


def _run_rendezvous(
    program: Program, table: CostTable, clocks: Clocks
) -> tuple[list[float], list[float], Clocks]:
    graph = program.graph
    steps = {step[0]: step for step in program.walk.steps}
    durations = _flat_durations(program, table)
    messages = {
        message.send: message
        for step in program.walk.steps
        if isinstance(step, Compute)
        for message in step.messages
    }
    start = [0.0] * len(graph.nodes)
    end = [0.0] * len(graph.nodes)
    free = list(clocks.ranks)
    channel = list(clocks.channels)
    for node in graph.order:
        rank = graph.rank[node]
        step = steps.get(node)
        if node in messages:
            message = messages[node]
            peer = graph.rank[message.recv]
            now = max(free[rank], free[peer])
            took = table.occupancy[message.boundary] + table.latency[message.boundary]
            start[node] = start[message.recv] = now
            end[node] = end[message.recv] = free[rank] = free[peer] = now + took
        elif isinstance(step, Compute):
            now = max([free[rank], *(end[need] for need in step.needs)])
            start[node] = now
            end[node] = free[rank] = now + durations[step.duration]
        elif isinstance(step, Channel):
            if step.released_by >= 0:
                ready = start[step.released_by]
                ready += step.fraction * (end[step.released_by] - ready)
            else:
                issued = 0.0 if step.bucket >= 0 else free[rank]
                ready = max([issued, *(end[need] for need in step.needs)])
            now = max(channel[rank], ready)
            start[node] = now
            end[node] = channel[rank] = now + table.on_channel(step.stage, step.bucket)
    return start, end, Clocks(tuple(free), tuple(channel), clocks.links)
