"""One schedule's order flattened, so that many cost tables can be tried on it quickly.

A search looks at one order with dozens of cuts, tensor-parallel degrees and batch sizes. Here the
order is walked once; ``clock`` and ``held`` then only add numbers. Nothing is verified: what a
search chooses is compiled as every plan is, and the tests hold both to the same times and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strategies.compiler import compile_compute, order_compute
from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, Kind
from strategies.ir.placement import Placement
from strategies.ir.program import Program
from strategies.ir.walk import DURATION_ROWS
from strategies.passes.recompute.apply_checkpoint import apply_checkpoint
from strategies.passes.recompute.policy import add_recompute
from strategies.plan import Plan
from strategies.recompute import NO_RECOMPUTE, Recompute

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
        """Stages to ranks."""
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
            elif item.kind is Kind.B or item.kind is Kind.W:
                last[item.stage] = node
    return first, last


def _held(
    row: Sequence[Instruction], stages: tuple[int, ...]
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """What a rank holds at its worst moments: counts per stage, as in ``strategies.memory``."""
    again = {(item.stage, item.microbatch) for item in row if item.kind is Kind.R}
    place = {stage: index for index, stage in enumerate(stages)}
    full, inputs = [0] * len(stages), [0] * len(stages)
    moments: dict[tuple[int, ...], None] = {}
    rising = False
    for item in row:
        index = place[item.stage]
        if item.kind is Kind.F:
            if (item.stage, item.microbatch) in again:
                inputs[index] += 1
            else:
                full[index] += 1
            rising = True
        elif item.kind is Kind.R:
            inputs[index] -= 1
            full[index] += 1
            rising = True
        elif item.kind is Kind.B or item.kind is Kind.W:
            if rising:
                moments[(*full, *inputs)] = None
                rising = False
            full[index] -= 1
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
