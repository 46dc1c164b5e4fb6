"""The figures of a timeline: what result.json says about a simulated or predicted step."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.analysis.bounds import Bound, lower_bound, memory_bound
from strategies.analysis.memory import peak_activations, peak_memory_bytes
from strategies.analysis.timeline import Timeline
from strategies.costs.table import Costs
from strategies.ir.kinds import ESSENTIAL_KINDS, Kind
from strategies.ir.program import recomputed_pairs
from strategies.ir.versions import gradient_sums, staleness, weight_versions

_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Metrics:
    """One step in figures; durations in ``time_unit``.

    Without a flush a step is one batch of the steady state: makespan and period are the time from
    batch to batch, and the bound is what the busiest rank computes.

    Attributes:
        makespan: First start to last end, a barrier at the flush.
        period: Max over ranks of (end - start): no barrier.
        bubble_ratio: Idle over P * makespan.
        lower_bound: No order of these F, B, I and W on this placement is faster (LB1), or none that
            holds as few full activations, with any of them recomputed (LB2).
        binding_bound: Which bound that is, and on which rank.
        lb1: LB1 by itself.
        lb1_rank: The rank that it binds on.
        lb2: LB2 by itself.
        lb2_rank: The rank that it binds on.
        bound_gap: makespan / lower_bound - 1.
        gap_to_ideal: makespan over 1/P of all F, B, I and W, minus 1; (p-1)/m for 1F1B.
        peak_activations: Per rank, in full-rank microbatches.
        peak_memory_bytes: Per rank, None where the costs have no bytes.
        recomputed: Forwards that are run again, on all ranks together.
        exposed_grad_reduce: What reductions add after the last compute.
        throughput: Microbatches of a step over its makespan, of one replica. GPipe's at stages of
            unequal costs is M / (sum + (M - 1) max) of their F + B, 1F1B's is no less.
        num_messages: What one replica's ranks send each other in a step.
        weight_copies: Ranks that hold each stage.
        synchronous: Whether the pipeline drains at the optimizer step.
        weight_versions: Per rank, versions of its weights at its worst moment; 1 with a flush.
        gradient_sums: Per rank, updates whose gradients it holds then; 1 with a flush.
        staleness: Per stage, by how many updates its gradients are late; 0 with a flush.
        costs: Where the durations come from.
        time_unit: ``F`` or ``s``.
    """

    makespan: float
    period: float
    bubble_ratio: float
    lower_bound: float
    binding_bound: str
    lb1: float
    lb1_rank: int
    lb2: float
    lb2_rank: int
    bound_gap: float
    gap_to_ideal: float
    peak_activations: tuple[float, ...]
    peak_memory_bytes: tuple[int | None, ...]
    recomputed: int
    exposed_grad_reduce: float
    throughput: float
    num_messages: int
    weight_copies: int
    synchronous: bool
    weight_versions: tuple[int, ...]
    gradient_sums: tuple[int, ...]
    staleness: tuple[int, ...]
    costs: str
    time_unit: str


def measure(timeline: Timeline, costs: Costs, *, cap: float | None = None) -> Metrics:
    """Figures of a training program's timeline, with the bounds that its costs imply.

    ``cap`` is what a rank may hold, in full-rank microbatches; None for what each holds at most.
    """
    program = timeline.program
    table = costs.table(program)
    full = peak_activations(program)
    caps = full if cap is None else tuple(max(cap, peak) for peak in full)
    steps = program.steps
    if program.updates is None:
        lb1, lb2 = lower_bound(program, table), memory_bound(program, table, caps)
    else:
        # Behind each other without a flush, batches take what the busiest rank computes.
        busy = [timeline.busy(rank) / steps for rank in range(len(program.ranks))]
        rank = max(range(len(busy)), key=lambda each: (busy[each], -each))
        lb1 = lb2 = Bound(busy[rank], f"LB1 rank {rank}")
    # Equal up to rounding, LB1 is named: it needs no word about memory.
    bound = lb2 if lb2.value > lb1.value * (1 + _SAME) else lb1
    makespan = timeline.step
    ranks = range(len(program.ranks))
    needed = sum(
        event.end - event.start
        for rank in ranks
        for event in timeline.events(rank)
        if event.instruction.kind in ESSENTIAL_KINDS
    )
    ideal = needed / len(ranks) / steps
    return Metrics(
        makespan=makespan,
        period=timeline.period,
        bubble_ratio=timeline.bubble_ratio,
        lower_bound=bound.value,
        binding_bound=bound.name,
        lb1=lb1.value,
        lb1_rank=lb1.rank,
        lb2=lb2.value,
        lb2_rank=lb2.rank,
        bound_gap=makespan / bound.value - 1.0,
        gap_to_ideal=makespan / ideal - 1.0,
        peak_activations=peak_activations(program, table),
        peak_memory_bytes=peak_memory_bytes(program, table),
        recomputed=int(len(recomputed_pairs(program)) / steps),
        exposed_grad_reduce=timeline.exposed_grad_reduce,
        throughput=program.num_microbatches / steps / makespan,
        num_messages=int(
            sum(item.kind is Kind.SEND for row in program.ranks for item in row) / steps
        ),
        weight_copies=program.placement.weight_copies,
        synchronous=program.updates is None,
        weight_versions=weight_versions(program),
        gradient_sums=gradient_sums(program),
        staleness=staleness(program),
        costs=table.name,
        time_unit=table.time_unit,
    )
