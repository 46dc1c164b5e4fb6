"""How long one step of a walked order takes: the simulator's model, without its timeline.

The same rules as ``strategies.simulator.engine`` with buffered messages: lists in order, a message
leaves when its value is there, keeps its link and arrives a latency later, each rank has one
collective channel. Buckets of one stage take equally long and get ready evenly, so the end of the
last one has a closed form. A test holds both to the same times on every schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


class StepTime(NamedTuple):
    """Of one simulated step, in the table's time unit."""

    makespan: float
    period: float


def step_time(structure: Structure, table: CostTable, *, overlap: bool) -> StepTime:
    """Makespan and period of one step.

    Args:
        structure: The order.
        table: For as many stages; its ``reduce`` has one figure per bucket, all of a stage equal.
        overlap: Whether reductions start inside the stage's last backward.
    """
    ranks = range(structure.placement.num_ranks)
    ready, channel = _gathers(structure, table)
    start, end, free = _walk(structure, table, ready)
    begins, ends = [], []
    for rank in ranks:
        begin = start[structure.first_of_rank[rank]]
        gathers = any(table.gather) and any(table.gather[s] for s in structure.stages_by_end[rank])
        begins.append(0.0 if gathers else begin)
        now, busy = free[rank], channel[rank]
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
                busy = max(busy, free[rank]) + count * each
            reduced[stage] = busy
        for stage in structure.stages_by_end[rank]:
            now = max(now, reduced[stage]) + table.step[stage]
        ends.append(max(now, busy))
    makespan = max(ends) - min(begins)
    period = max(last - first for first, last in zip(begins, ends, strict=True))
    return StepTime(makespan, period)


def _gathers(structure: Structure, table: CostTable) -> tuple[dict[int, float], list[float]]:
    """When the weights of each stage are there, by the node that waits, and the channels."""
    ready: dict[int, float] = {}
    channel = [0.0] * structure.placement.num_ranks
    if any(table.gather):
        for rank, stages in enumerate(structure.stages_by_start):
            for stage in stages:
                if table.gather[stage]:
                    channel[rank] += table.gather[stage]
                    ready[structure.first_of_stage[stage]] = channel[rank]
    return ready, channel


def _walk(
    structure: Structure, table: CostTable, ready: dict[int, float]
) -> tuple[list[float], list[float], list[float]]:
    """Start and end per node, and when each rank has ended its list."""
    durations = table.flat()
    latency, occupancy = table.latency, table.occupancy
    num_ranks = structure.placement.num_ranks
    count = len(structure.moves)
    start, end, there = [0.0] * count, [0.0] * count, [0.0] * count
    free, links = [0.0] * num_ranks, [0.0] * (num_ranks * num_ranks)
    for node, rank, duration, need, link, boundary in structure.moves:
        now = free[rank]
        if need >= 0 and there[need] > now:
            now = there[need]
        if ready and ready.get(node, 0.0) > now:
            now = ready[node]
        start[node] = now
        now += durations[duration]
        end[node] = free[rank] = now
        if link >= 0:
            if links[link] > now:
                now = links[link]
            now += occupancy[boundary]
            links[link] = now
            now += latency[boundary]
        there[node] = now
    return start, end, free


# -------------------------------------------------------------------------------------------- held
#
# Memory per rank of a walked order: the sums of ``strategies.analysis.memory``, from counts.


def rank_bytes(structure: Structure, table: CostTable) -> tuple[int, ...]:
    """Peak per rank: weights, gradients, optimizer state and activations.

    Args:
        structure: The order.
        table: For as many stages, with bytes.
    """
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
#
# One schedule's order flattened, so that many cost tables can be tried on it quickly.
#
# A search looks at one order with dozens of cuts, tensor-parallel degrees and batch sizes. Here the
# order is walked once; ``clock`` and ``held`` then only add numbers. Nothing is verified: what a
# search chooses is compiled as every plan is, and the tests hold both to the same times and bytes.


_ROW = {kind: index for index, kind in enumerate(DURATION_ROWS)}


Move = tuple[int, int, int, int, int, int]
"""One instruction, what it waits for and where its result goes: node, rank, index into the flat
duration table, node whose result must be there (-1 for none), source rank * P + target rank (-1 if
the result stays), boundary that it crosses (-1 likewise). Searches make and read millions of them.
"""


@dataclass(frozen=True, slots=True)
class Structure:
    """An order, walked.

    Attributes:
        draft: The program without its lists: placement and boundaries.
        moves: In one order in which all can run.
        first_of_rank: Per rank, the node that runs first.
        first_of_stage: Per stage, the node of its first forward.
        stages_by_end: Per rank, its stages in the order of their last gradients.
        stages_by_start: Per rank, its stages in the order of their first forwards.
        last_of_stage: Per stage, the node of its last gradient.
        held: Per rank, the (stage, full activations, stage inputs) that it holds at moments none of
            which is below another in all of them.
        splits: Whether any backward is split into I and W.
    """

    draft: Program
    moves: tuple[Move, ...]
    first_of_rank: tuple[int, ...]
    first_of_stage: tuple[int, ...]
    stages_by_end: tuple[tuple[int, ...], ...]
    stages_by_start: tuple[tuple[int, ...], ...]
    last_of_stage: tuple[int, ...]
    held: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]
    splits: bool

    @property
    def placement(self) -> Placement:
        return self.draft.placement


def build_structure(plan: Plan) -> Structure:
    """Orders and walks a plan with one weight copy.

    Args:
        plan: ``recompute`` counts, ``overlap`` and ``buckets`` do not.

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
    forward_end: dict[tuple[int, int], int] = {}
    gradient_end: dict[tuple[int, int], int] = {}
    rows = program.ranks
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    place = [0] * num_ranks
    moves: list[Move] = []
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
                need, link, crossed = -1, -1, -1
                if kind is Kind.F:
                    if stage:
                        need = forward_end.get((stage - 1, microbatch), -1)
                        if need < 0:
                            break
                    if stage < last_stage:
                        forward_end[stage, microbatch] = node
                        if owner[stage + 1] != rank:
                            link = rank * num_ranks + owner[stage + 1]
                            crossed = boundary[stage, stage + 1]
                elif kind is Kind.B or kind is Kind.I:
                    if stage < last_stage:
                        need = gradient_end.get((stage + 1, microbatch), -1)
                        if need < 0:
                            break
                    if stage:
                        gradient_end[stage, microbatch] = node
                        if owner[stage - 1] != rank:
                            link = rank * num_ranks + owner[stage - 1]
                            crossed = boundary[stage - 1, stage]
                elif item.after:
                    # An R that waits for its gradient.
                    need = gradient_end.get((stage + 1, microbatch), -1)
                    if need < 0:
                        break
                duration = _ROW[kind] * num_stages + stage
                moves.append((node, rank, duration, need, link, crossed))
                index += 1
            place[rank] = index
            progressed = progressed or index > begun
            if index < len(row):
                still.append(rank)
        if still and not progressed:
            raise ProgramError(f"{program.schedule}: the lists of ranks {still} cannot run.")
        waiting = still
    first, last = _first_and_last(program, offsets)
    stages = [placement.stages_of(rank) for rank in range(num_ranks)]
    return Structure(
        draft=program.with_ranks(((),) * num_ranks),
        moves=tuple(moves),
        first_of_rank=tuple(offsets[:-1]),
        first_of_stage=tuple(first),
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
