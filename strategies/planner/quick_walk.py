"""How long one step of a plan takes, without its whole program.

The order is put into the steps of ``strategies.simulator.engine`` without a graph, messages, checks
and updates, and timed by the same pass. Buckets of one stage take equally long and get ready
evenly, so the end of the last one has a closed form. That takes 17 ms instead of 480 for 32 ranks x
64 microbatches (tests/benchmarks/simulator_speed.py). A test holds both to the same times on every
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from strategies.analysis.memory import vector
from strategies.compiler import compile_compute, order_compute
from strategies.costs.table import CostTable
from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, KINDS, Amounts, Kind, Purpose
from strategies.ir.placement import Placement
from strategies.ir.program import Program
from strategies.ir.walk import DURATION_ROWS
from strategies.passes.recompute.add_recompute import add_recompute
from strategies.passes.recompute.mario import apply_checkpoint
from strategies.plan import NO_RECOMPUTE, Plan, Recompute
from strategies.simulator.engine import (
    ChannelStep,
    Clocks,
    ComputeStep,
    Sent,
    flat_durations,
    run_lists,
)


class StepTime(NamedTuple):
    """Of one simulated step, in the table's time unit."""

    makespan: float
    period: float


def step_time(structure: Structure, table: CostTable, *, overlap: bool) -> StepTime:
    """Makespan and period of one step.

    The table's ``reduce`` has one figure per bucket, all of a stage equal. With ``overlap``
    reductions start inside the stage's last backward.
    """
    ranks = range(structure.placement.num_ranks)
    gathers = _gathers(structure, table)
    start, end, clocks = run_lists(
        [*gathers, *structure.steps],
        structure.num_nodes,
        durations=flat_durations(table),
        latency=table.latency,
        occupancy=table.occupancy,
        on_channel=table.on_channel,
        clocks=Clocks.at_zero(len(ranks)),
    )
    gathering = {rank for _, rank, *_ in gathers}
    begins, ends = [], []
    for rank in ranks:
        begins.append(0.0 if rank in gathering else start[structure.first_of_rank[rank]])
        now, busy = clocks.ranks[rank], clocks.channels[rank]
        reduced = {}
        for stage in structure.stages_by_end[rank]:
            node = structure.last_of_stage[stage]
            buckets = table.reduce[stage] if table.reduce else ()
            count = len(buckets)
            if not count:
                reduced[stage] = end[node]
                continue
            each = buckets[0]
            if overlap:
                # Bucket k gets ready (k + 1) / count into the backward; what waits for a bucket is
                # linear in k, so that the first or the last one decides.
                once = (end[node] - start[node]) / count
                busy = max(busy, start[node] + once) + count * each
                busy = max(busy, end[node] + each)
            else:
                busy = max(busy, clocks.ranks[rank]) + count * each
            reduced[stage] = busy
        for stage in structure.stages_by_end[rank]:
            now = max(now, reduced[stage]) + table.step[stage]
        ends.append(max(now, busy))
    makespan = max(ends) - min(begins)
    period = max(last - first for first, last in zip(begins, ends, strict=True))
    return StepTime(makespan, period)


def _gathers(structure: Structure, table: CostTable) -> list[ChannelStep]:
    """The gathers of a step's beginning, as ``ir.walk`` has them."""
    return [
        (structure.gather_of_stage[stage], rank, stage, -1, -1, 0.0, ())
        for rank, stages in enumerate(structure.stages_by_start)
        for stage in stages
        if table.gather and table.gather[stage]
    ]


# -------------------------------------------------------------------------------------------- held
# The sums of ``strategies.analysis.memory``, from counts.


def rank_bytes(structure: Structure, table: CostTable) -> tuple[int, ...]:
    """Peak per rank: weights, gradients, optimizer state and activations."""
    assert table.activation_bytes is not None
    assert table.state_bytes is not None
    full = table.activation_bytes
    shares = table.stage_input or (0.0,) * len(full)
    inputs = [share * size for share, size in zip(shares, full, strict=True)]
    result = []
    for rank, moments in enumerate(structure.held):
        state = sum(table.state_bytes[stage] for stage in structure.stages_by_end[rank])
        peak = max(
            (
                sum(whole * full[stage] + kept * inputs[stage] for stage, whole, kept in moment)
                for moment in moments
            ),
            default=0.0,
        )
        result.append(int(state + peak))
    return tuple(result)


# --------------------------------------------------------------------------------------- structure
# A search looks at one order with dozens of cuts, tensor-parallel degrees and batch sizes. Here the
# order is walked once; ``step_time`` and ``rank_bytes`` then only add numbers. Nothing is verified:
# what a search chooses is compiled as every plan is, and the tests hold both to the same times and
# bytes.

_ROW = {kind: index for index, kind in enumerate(DURATION_ROWS)}


@dataclass(frozen=True, slots=True)
class Structure:
    """An order, walked.

    Attributes:
        draft: The program without its lists: placement and boundaries.
        steps: In one order in which all can run, for ``run_lists``. Of N instructions, node n's
            message to another rank is node N + n; what gathers stage s is node 2 N + s.
        first_of_rank: Per rank, the node that runs first.
        stages_by_end: Per rank, its stages in the order of their last gradients.
        stages_by_start: Per rank, its stages in the order of their first forwards.
        last_of_stage: Per stage, the node of its last gradient.
        held: Per rank, the (stage, full activations, stage inputs) that it holds at moments none of
            which is below another in all of them.
        splits: Whether any backward is split into I and W.
    """

    draft: Program
    steps: tuple[ComputeStep, ...]
    first_of_rank: tuple[int, ...]
    stages_by_end: tuple[tuple[int, ...], ...]
    stages_by_start: tuple[tuple[int, ...], ...]
    last_of_stage: tuple[int, ...]
    held: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]
    splits: bool

    @property
    def placement(self) -> Placement:
        return self.draft.placement

    @property
    def num_nodes(self) -> int:
        return 2 * len(self.steps) + self.placement.num_stages

    @property
    def gather_of_stage(self) -> range:
        return range(2 * len(self.steps), self.num_nodes)


def build_structure(plan: Plan) -> Structure:
    """Orders and walks a plan with one weight copy.

    ``recompute`` counts, ``overlap`` and ``buckets`` do not.

    Raises:
        PlanError: The plan breaks a rule of its schedule.
        ProgramError: Its lists cannot run.
    """
    recompute = plan.recompute
    bare = replace(plan, recompute=NO_RECOMPUTE) if recompute.rewrites else plan
    ordered = compile_compute(bare) if plan.split_backward else order_compute(bare)
    return flatten(_recomputed(ordered, recompute, plan))


def flatten(program: Program) -> Structure:
    """Walks a compute program with one weight copy and without fused pairs.

    Raises:
        ProgramError: Its lists cannot run.
    """
    placement = program.placement
    assert placement.weight_copies == 1
    owner = placement.copies[0]
    num_ranks, num_stages = placement.num_ranks, placement.num_stages
    boundary = {(b.source, b.target): index for index, b in enumerate(program.boundaries)}
    # Where the result is known: the node itself, or its message.
    forward_end: dict[tuple[int, int], int] = {}
    gradient_end: dict[tuple[int, int], int] = {}
    rows = program.ranks
    offsets = list(accumulate(map(len, rows), initial=0))
    count = offsets[-1]
    first, last = _first_and_last(program, offsets)
    place = [0] * num_ranks
    steps: list[ComputeStep] = []
    last_stage = num_stages - 1
    waiting = list(range(num_ranks))
    while waiting:
        progressed = False
        still = []
        for rank in waiting:
            row, index = rows[rank], place[rank]
            begun = index
            while index < len(row):
                item = row[index]
                kind, stage, microbatch = item.kind, item.stage, item.microbatch
                assert microbatch is not None
                node = offsets[rank] + index
                needs: tuple[int, ...] = ()
                messages: tuple[Sent, ...] = ()
                if kind is Kind.F:
                    if stage:
                        need = forward_end.get((stage - 1, microbatch), -1)
                        if need < 0:
                            break
                        needs = (need,)
                    if node == first[stage]:
                        needs = (*needs, 2 * count + stage)
                    if stage < last_stage:
                        known = node
                        if owner[stage + 1] != rank:
                            known = count + node
                            link = rank * num_ranks + owner[stage + 1]
                            messages = ((known, known, link, boundary[stage, stage + 1]),)
                        forward_end[stage, microbatch] = known
                elif kind is Kind.B or kind is Kind.I:
                    if stage < last_stage:
                        need = gradient_end.get((stage + 1, microbatch), -1)
                        if need < 0:
                            break
                        needs = (need,)
                    if stage:
                        known = node
                        if owner[stage - 1] != rank:
                            known = count + node
                            link = rank * num_ranks + owner[stage - 1]
                            messages = ((known, known, link, boundary[stage - 1, stage]),)
                        gradient_end[stage, microbatch] = known
                elif item.after:
                    # An R that waits for its gradient.
                    need = gradient_end.get((stage + 1, microbatch), -1)
                    if need < 0:
                        break
                    needs = (need,)
                steps.append((node, rank, _ROW[kind] * num_stages + stage, needs, messages))
                index += 1
            place[rank] = index
            progressed = progressed or index > begun
            if index < len(row):
                still.append(rank)
        if still and not progressed:
            raise ProgramError(f"{program.schedule}: the lists of ranks {still} cannot run.")
        waiting = still
    stages = [placement.stages_of(rank) for rank in range(num_ranks)]
    return Structure(
        draft=program.with_ranks(((),) * num_ranks),
        steps=tuple(steps),
        first_of_rank=tuple(offsets[:-1]),
        stages_by_end=tuple(tuple(sorted(own, key=last.__getitem__)) for own in stages),
        stages_by_start=tuple(tuple(sorted(own, key=first.__getitem__)) for own in stages),
        last_of_stage=tuple(last),
        held=tuple(_held(row, own) for row, own in zip(rows, stages, strict=True)),
        splits=any(item.kind is Kind.W for row in rows for item in row),
    )


def _recomputed(program: Program, recompute: Recompute, plan: Plan) -> Program:
    if not recompute.rewrites:
        return program
    if recompute.policy == "full":
        return apply_checkpoint(program)
    return add_recompute(program, recompute, plan.costs)


def _first_and_last(program: Program, offsets: list[int]) -> tuple[list[int], list[int]]:
    """Per stage, the nodes of its first forward and its last gradient."""
    first = [-1] * program.placement.num_stages
    last = [-1] * program.placement.num_stages
    for offset, row in zip(offsets, program.ranks, strict=False):
        for node, item in enumerate(row, offset):
            if item.kind is Kind.F:
                if first[item.stage] < 0:
                    first[item.stage] = node
            elif item.kind in GRADIENT_KINDS:
                last[item.stage] = node
    return first, last


def _counted(amounts: Amounts) -> tuple[int, int] | None:
    """Full activations, what waits for a W among them, and stage inputs; None for neither."""
    full = amounts.get(Purpose.GRAPH, 0) + amounts.get(Purpose.WAITING, 0)
    inputs = amounts.get(Purpose.INPUT, 0)
    return (full, inputs) if full or inputs else None


_COUNTS = {
    (kind, again): tuple(map(_counted, vector(kind, again=again)))
    for kind in KINDS
    for again in (False, True)
}


def _held(
    row: Sequence[Instruction], stages: tuple[int, ...]
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """What a rank holds at its worst moments: counts per stage, as ``analysis.memory`` has them."""
    again = {(item.stage, item.microbatch) for item in row if item.kind is Kind.R}
    place = {stage: index for index, stage in enumerate(stages)}
    full, inputs = [0] * len(stages), [0] * len(stages)
    moments: dict[tuple[int, ...], None] = {}
    rising = False
    for item in row:
        index = place[item.stage]
        takes, frees = _COUNTS[item.kind, (item.stage, item.microbatch) in again]
        if takes:
            full[index] += takes[0]
            inputs[index] += takes[1]
            rising = True
        if frees:
            if rising:
                moments[(*full, *inputs)] = None
                rising = False
            full[index] -= frees[0]
            inputs[index] -= frees[1]
    worst = _not_below_another(list(moments))
    count = len(stages)
    return tuple(
        tuple((stage, moment[index], moment[count + index]) for index, stage in enumerate(stages))
        for moment in worst
    )


def _not_below_another(moments: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The moments that no other one exceeds or equals in every count."""
    kept: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(map(int.__le__, moment, other)) for other in kept):
            kept.append(moment)
    return kept
