"""The figures of a timeline: what result.json says about a simulated or predicted step."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.bounds import lower_bound
from strategies.costs.table import Costs
from strategies.ir.instruction import Kind
from strategies.memory import peak_activations, peak_bytes
from strategies.timeline import Timeline

# What any schedule computes; R is a schedule's own choice.
_NEEDED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP})


@dataclass(frozen=True, slots=True)
class Metrics:
    """One step in figures; durations in ``time_unit``.

    Attributes:
        makespan: First start to last end, a barrier at the flush.
        period: Max over ranks of (end - start): nobody waits at a barrier.
        bubble_ratio: Idle over P * makespan.
        lower_bound: No order of these instructions on this placement is faster.
        binding_bound: Which bound that is, and on which rank.
        bound_gap: makespan / lower_bound - 1.
        gap_to_ideal: makespan over 1/P of all F, B, I and W, minus 1; (p-1)/m for 1F1B.
        peak_activations: Per rank, in full-rank microbatches.
        peak_memory_bytes: Per rank, None where the costs have no bytes.
        exposed_grad_reduce: What reductions add after the last compute.
        weight_copies: Ranks that hold each stage.
        synchronous: Whether the pipeline drains at the optimizer step.
        costs: Where the durations come from.
        time_unit: ``F`` or ``s``.
    """

    makespan: float
    period: float
    bubble_ratio: float
    lower_bound: float
    binding_bound: str
    bound_gap: float
    gap_to_ideal: float
    peak_activations: tuple[float, ...]
    peak_memory_bytes: tuple[int | None, ...]
    exposed_grad_reduce: float
    weight_copies: int
    synchronous: bool
    costs: str
    time_unit: str


def measure(timeline: Timeline, costs: Costs) -> Metrics:
    """Figures of a timeline, with the bounds that its costs imply."""
    program = timeline.program
    table = costs.table(program)
    bound = lower_bound(program, table)
    makespan = timeline.makespan
    ranks = range(len(program.ranks))
    needed = sum(
        event.end - event.start
        for rank in ranks
        for event in timeline.events(rank)
        if event.instruction.kind in _NEEDED
    )
    ideal = needed / len(ranks)
    return Metrics(
        makespan=makespan,
        period=timeline.period,
        bubble_ratio=timeline.bubble_ratio,
        lower_bound=bound.value,
        binding_bound=bound.name,
        bound_gap=makespan / bound.value - 1.0,
        gap_to_ideal=makespan / ideal - 1.0,
        peak_activations=peak_activations(program),
        peak_memory_bytes=peak_bytes(program, table),
        exposed_grad_reduce=timeline.exposed_grad_reduce,
        weight_copies=program.placement.weight_copies,
        synchronous=not program.exit.in_flight,
        costs=table.name,
        time_unit=table.time_unit,
    )
