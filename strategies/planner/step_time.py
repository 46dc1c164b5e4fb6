"""How long one step of a plan takes, without its whole program.

The order is put into the steps of ``strategies.simulator.engine`` without a graph, messages, checks
and updates, and timed by the same pass. Buckets of one stage take equally long and get ready
evenly, so the end of the last one has a closed form. With the program's own graph instead,
``benchmarks.plan_speed`` takes a third more CPU time, and single questions more than twice as much.
A test holds both to the same times on every schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from itertools import chain as chained
from typing import NamedTuple

from strategies.compiler import compile_compute, order_compute
from strategies.costs.table import CostTable
from strategies.errors import ProgramError
from strategies.ir.graph import DURATION_ROWS
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, Kind
from strategies.ir.program import Placement, Program
from strategies.passes.recompute.add_recompute import add_recompute, mario_order
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
    exposed: float  # How long the last reduction outlasts the last compute.


def step_time(structure: OrderGraph, table: CostTable, *, overlap: bool) -> StepTime:
    """Makespan and period of one step.

    The table's ``reduce`` has one figure per bucket, all of a stage equal. With ``overlap``
    reductions start inside the stage's last backward.
    """
    ranks, num_stages = range(structure.placement.num_ranks), structure.placement.num_stages
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
    begins, ends, last_reduced = [], [], 0.0
    for rank in ranks:
        begins.append(0.0 if rank in gathering else start[structure.first_of_rank[rank]])
        last_of_stage = structure.last[rank * num_stages : (rank + 1) * num_stages]
        now, busy = clocks.ranks[rank], clocks.channels[rank]
        reduced = {}
        for stage in structure.stages_by_end[rank]:
            node = last_of_stage[stage]
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
            last_reduced = max(last_reduced, busy)
        for stage in structure.stages_by_end[rank]:
            now = max(now, reduced[stage]) + table.step[stage]
        ends.append(max(now, busy))
    makespan = max(ends) - min(begins)
    period = max(last - first for first, last in zip(begins, ends, strict=True))
    return StepTime(makespan, period, max(0.0, last_reduced - max(clocks.ranks)))


def idle_share(structure: OrderGraph, table: CostTable, makespan: float) -> float:
    """The bubble ratio of a step."""
    durations = flat_durations(table)
    busy = sum(durations[index] for _, _, index, *_ in structure.steps)
    return 1.0 - busy / (structure.placement.num_ranks * makespan)


def _gathers(structure: OrderGraph, table: CostTable) -> list[ChannelStep]:
    """The gathers of a step's beginning."""
    return [
        (structure.gather(rank, stage), rank, stage, -1, -1, 0.0, ())
        for rank, stages in enumerate(structure.stages_by_start)
        for stage in stages
        if table.gather and table.gather[stage]
    ]


# --------------------------------------------------------------------------------------- structure
# A search looks at one order with dozens of cuts, tensor-parallel degrees and batch sizes. Here the
# order is walked once; ``step_time`` then only adds numbers. Nothing is verified: what a search
# chooses is compiled as every plan is, and the tests hold both to the same times.

_ROW = {kind: index for index, kind in enumerate(DURATION_ROWS)}


@dataclass(frozen=True, slots=True)
class OrderGraph:
    """An order, walked.

    Attributes:
        draft: The program without its lists: placement and boundaries.
        steps: In one order in which all can run, for ``run_lists``. Of N instructions on P ranks,
            node n's message to another rank is node N + n; what gathers stage s on rank r is node
            2 N + r S + s.
        first_of_rank: Per rank, the node that runs first.
        stages_by_end: Per rank, its stages in the order of their last gradients.
        stages_by_start: Per rank, its stages in the order of their first forwards.
        last: The node of a stage's last gradient on a rank, at r S + s.
    """

    draft: Program
    steps: tuple[ComputeStep, ...]
    first_of_rank: tuple[int, ...]
    stages_by_end: tuple[tuple[int, ...], ...]
    stages_by_start: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]

    @property
    def placement(self) -> Placement:
        return self.draft.placement

    @property
    def num_nodes(self) -> int:
        return 2 * len(self.steps) + self.placement.num_ranks * self.placement.num_stages

    def gather(self, rank: int, stage: int) -> int:
        return 2 * len(self.steps) + rank * self.placement.num_stages + stage


def compute_program(plan: Plan) -> Program:
    """A plan's compute lists without a check."""
    recompute = plan.recompute
    bare = replace(plan, recompute=NO_RECOMPUTE) if recompute.rewrites else plan
    ordered = compile_compute(bare) if plan.split_backward else order_compute(bare)
    return _recomputed(ordered, recompute, plan)


def build_order_graph(program: Program) -> OrderGraph:
    """Walks a compute program without fused pairs.

    Raises:
        ProgramError: Its lists cannot run.
    """
    placement = program.placement
    copies, num_copies = placement.copies, placement.weight_copies
    num_ranks, num_stages = placement.num_ranks, placement.num_stages
    boundary = {(b.source, b.target): index for index, b in enumerate(program.boundaries)}
    # Of a stage's two neighbours, by the boundary of each: -1 for none.
    down = [boundary.get((stage, stage + 1), -1) for stage in range(num_stages)]
    up = [boundary.get((stage - 1, stage), -1) for stage in range(num_stages)]
    # Where the result is known: the node itself, or its message; at stage * M + microbatch.
    width, last_stage = program.num_microbatches, num_stages - 1
    forward_end = [-1] * (num_stages * width)
    gradient_end = list(forward_end)
    rows = program.ranks
    offsets = list(accumulate(map(len, rows), initial=0))
    count = offsets[-1]
    # The nodes of a stage's first forward and last gradient on a rank, at r S + s; -1 for none.
    first, last = [-1] * (num_ranks * num_stages), [-1] * (num_ranks * num_stages)
    place = [0] * num_ranks
    steps: list[ComputeStep] = []
    add_step = steps.append
    columns = {kind: row * num_stages for kind, row in _ROW.items()}
    forward, of_gradient = Kind.F, (Kind.B, Kind.I)
    # Of each list, what it stopped at, and what comes behind that.
    blocked: list[tuple[Instruction, ...]] = [()] * num_ranks
    left = list(map(iter, rows))
    waiting = list(range(num_ranks))
    while waiting:
        progressed = False
        still = []
        for rank in waiting:
            index, offset = place[rank], offsets[rank]
            begun = index
            links = rank * num_ranks
            for item in chained(blocked[rank], left[rank]):
                kind, stage, microbatch = item.kind, item.stage, item.microbatch
                assert microbatch is not None
                node = offset + index
                at = stage * width + microbatch
                needs: tuple[int, ...] = ()
                messages: tuple[Sent, ...] = ()
                if kind is forward:
                    if stage:
                        need = forward_end[at - width]
                        if need < 0:
                            break
                        needs = (need,)
                    here = rank * num_stages + stage
                    if first[here] < 0:
                        first[here] = node
                        needs = (*needs, 2 * count + here)
                    if stage < last_stage:
                        peer = copies[microbatch % num_copies][stage + 1]
                        if peer == rank:
                            forward_end[at] = node
                        else:
                            known = forward_end[at] = count + node
                            messages = ((known, known, links + peer, down[stage]),)
                elif kind in of_gradient:
                    if stage < last_stage:
                        need = gradient_end[at + width]
                        if need < 0:
                            break
                        needs = (need,)
                    if stage:
                        peer = copies[microbatch % num_copies][stage - 1]
                        if peer == rank:
                            gradient_end[at] = node
                        else:
                            known = gradient_end[at] = count + node
                            messages = ((known, known, links + peer, up[stage]),)
                elif item.after:
                    # An R that waits for its gradient.
                    need = gradient_end[at + width]
                    if need < 0:
                        break
                    needs = (need,)
                if kind in GRADIENT_KINDS:
                    last[rank * num_stages + stage] = node
                add_step((node, rank, columns[kind] + stage, needs, messages))
                index += 1
            else:
                place[rank] = index
                progressed = True
                continue
            blocked[rank] = (item,)
            place[rank] = index
            progressed = progressed or index > begun
            still.append(rank)
        if still and not progressed:
            raise ProgramError(f"{program.schedule}: the lists of ranks {still} cannot run.")
        waiting = still
    stages = [placement.stages_of(rank) for rank in range(num_ranks)]

    def by(when: list[int], rank: int) -> tuple[int, ...]:
        return tuple(sorted(stages[rank], key=lambda stage: when[rank * num_stages + stage]))

    return OrderGraph(
        draft=program.with_ranks(((),) * num_ranks),
        steps=tuple(steps),
        first_of_rank=tuple(offsets[:-1]),
        stages_by_end=tuple(by(last, rank) for rank in range(num_ranks)),
        stages_by_start=tuple(by(first, rank) for rank in range(num_ranks)),
        last=tuple(last),
    )


def _recomputed(program: Program, recompute: Recompute, plan: Plan) -> Program:
    if not recompute.rewrites:
        return program
    if recompute.policy == "full":
        return apply_checkpoint(program)
    if recompute.policy == "mario" and plan.costs is not None:
        return mario_order(program, recompute.passes, plan.costs, check=lambda order: order)
    return add_recompute(program, recompute, plan.costs)
