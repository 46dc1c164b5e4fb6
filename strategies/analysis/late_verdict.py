"""How far ranks may go on before the verdict on the update before is in, and what that is worth.

With clipping, or where a step that is not finite is left out, an update depends on the gradient's
norm, of which every rank has a part. *Post-validation* (Qi et al., 2024, section 4,
https://arxiv.org/abs/2401.10241) lets a rank update as if nothing were to be clipped and go on with
the next step's forwards; the norm is added up meanwhile. Where the norm says otherwise, those
forwards are thrown away, the update is undone and made as it should have been.

This needs a *cut* through the next step's program: what stands before it may run on weights that
are not yet confirmed, and be run again. It holds forwards only, none of the last stage (a loss is
computed once, and people's code with it) and not the last one of a rank (which tells others what
this one has seen). It is consistent: whatever stands before it gets its messages from before it,
so that all ranks can stop there. At the cut no rank waits long: the first forward of the last
stage, which every backward needs, comes after all other ranks have begun the step, and so after all
have given their part of the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from strategies.analysis.memory import peak_memory_bytes
from strategies.analysis.timeline import Timeline
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.kernels import memory_bound
from strategies.costs.profile_costs import ProfiledCosts
from strategies.costs.table import Costs
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, GRADIENT_KINDS, MESSAGE_KINDS, Kind
from strategies.ir.program import Program

# The least that a step must gain, as a share: below it the copy that makes an undo possible costs
# more than the wait.
_WORTH = 0.01


def speculation_limits(program: Program) -> tuple[int, ...]:
    """Per rank, the place in its list before which it has to know.

    >>> from strategies.compiler import compile_program
    >>> program = compile_program(schedule="zb_h2", pp=3, num_microbatches=5)
    >>> [sum(i.kind is Kind.F for i in row[:place])
    ...  for row, place in zip(program.ranks, speculation_limits(program), strict=True)]
    [4, 3, 0]
    """
    last = program.placement.num_stages - 1
    cuts = [_first_that_counts(row, last) for row in program.ranks]
    received = [ends for _, *ends in _messages(program)]
    moved = True
    while moved:
        moved = False
        for (rank, place), (sender, left) in received:
            if place < cuts[rank] and left >= cuts[sender]:
                cuts[rank] = place
                moved = True
    return tuple(cuts)


def receives_to_discard(program: Program, rank: int) -> tuple[Instruction, ...]:
    """A rank's RECVs whose message has left when all have stopped at their cut, in list order."""
    cuts = speculation_limits(program)
    return tuple(
        item
        for item, (receiver, _), (sender, left) in _messages(program)
        if receiver == rank and left < cuts[sender]
    )


def gains_time(timeline: Timeline) -> bool:
    """Whether steps that do not wait for each other at the flush are worth the trouble."""
    return timeline.period * (1 + _WORTH) < timeline.makespan


def with_update_barrier(program: Program) -> Program:
    """A program without a flush whose ranks agree on every update, to be simulated.

    With clipping by norm, or where a step that is not finite is left out, no rank makes an update
    before all others are at theirs.

    >>> from strategies.compiler import compile_program
    >>> late = compile_program(schedule="pipedream_2bw", pp=2, num_microbatches=2)
    >>> program = with_update_barrier(late)
    >>> next(str(item) for item in program.ranks[0] if item.kind is Kind.STEP)
    '0STEP#1@0B2#0+1B3#0'
    """
    before: dict[int | None, list[Instruction]] = {}
    for row in program.ranks:
        last: Instruction | None = None
        for item in row:
            if item.kind is Kind.STEP and last is not None:
                before.setdefault(item.version, []).append(last)
            elif item.microbatch is not None and item.kind not in MESSAGE_KINDS:
                last = replace(item, after=())
    return program.with_ranks(
        tuple(
            tuple(
                replace(item, after=tuple(before[item.version])) if item.kind is Kind.STEP else item
                for item in row
            )
            for row in program.ranks
        )
    )


def with_undo_buffers(costs: Costs) -> Costs:
    """The same with memory for what an undo needs; uniform costs know of no memory."""
    if isinstance(costs, AnalyticCosts):
        return replace(costs, keeps_updates=True)
    if isinstance(costs, ProfiledCosts):
        return replace(costs, assumed=replace(costs.assumed, keeps_updates=True))
    return costs


def post_validation_pays(timeline: Timeline, costs: Costs, *, memory_bytes: int | None) -> bool:
    """Whether a step gains more than keeping its update takes, within what a rank may hold.

    Args:
        timeline: Of a training program, with these costs.
        costs: Of steps that wait.
        memory_bytes: None for no limit.
    """
    kept = with_undo_buffers(costs)
    if not gains_time(timeline) or kept is costs:
        return gains_time(timeline)
    program = timeline.program
    before, after = costs.table(program), kept.table(program)
    peaks = peak_memory_bytes(program, after)
    if memory_bytes is not None and any(peak is None or peak > memory_bytes for peak in peaks):
        return False
    assert isinstance(costs, AnalyticCosts | ProfiledCosts)
    assert before.state_bytes is not None
    assert after.state_bytes is not None
    more = [b - a for a, b in zip(before.state_bytes, after.state_bytes, strict=True)]
    copied = max(
        sum(more[stage] for stage in program.placement.stages_of(rank))
        for rank in range(len(program.ranks))
    )
    return memory_bound(costs.hardware, 2 * copied) < timeline.makespan - timeline.period


def _first_that_counts(row: Sequence[Instruction], last: int) -> int:
    counts = GRADIENT_KINDS | BACKWARD_KINDS | {Kind.LOSS, Kind.REDUCE, Kind.STEP}
    end = len(row)
    final = max((p for p, item in enumerate(row) if _is_forward(item)), default=end)
    for place, item in enumerate(row):
        for part in item.parts:
            if part.kind in counts or (part.kind is Kind.F and part.stage == last):
                return min(place, final)
    return min(end, final)


def _is_forward(item: Instruction) -> bool:
    return any(part.kind is Kind.F for part in item.parts)


def _messages(program: Program) -> Iterator[tuple[Instruction, tuple[int, int], tuple[int, int]]]:
    """Each RECV, with the rank and place of it and of its SEND."""
    graph = program.dependencies
    for node, item in enumerate(graph.nodes):
        if item.kind is Kind.RECV:
            yield item, graph.place(node), graph.place(graph.partner[node])
