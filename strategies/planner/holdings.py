"""What the ranks of a plan hold, without its whole program.

A search asks twice. Of hundreds of orders it wants to know whether state and activations fit: sums
of ``strategies.analysis.memory`` from counts per stage, for which each list is walked once. Of what
it lists it wants all that the run's own figure has, messages and temporaries too: the lists get
their messages, in the places that the compiler gives them, and go to that same module. Neither is
verified, which is most of what compiling takes; tests hold both to the compiled program.

Where lists repeat themselves every few microbatches, so does what a rank holds: of a thousand
microbatches a few rounds tell it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import add, le

from strategies.analysis.memory import (
    RECEIVED_AHEAD,
    step_bytes,
    vector,
)
from strategies.costs.table import CostTable, StageMemory
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, KINDS, Amounts, Kind, Purpose
from strategies.ir.program import Program
from strategies.plan import Plan
from strategies.schedules import find_schedule

_WAITING = 8  # Messages that have arrived early on the worst rank: more than was ever seen.
_ROUNDS = 3
"""Rounds of microbatches after which nobody holds more than before."""

Moments = tuple[tuple[tuple[int, int, int, int], ...], ...]
"""Of one rank, the (stage, full activations, stage inputs, results) that it holds at moments none
of which is below another in all of them."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What each rank of an order holds at its worst moments, in counts, and its stages."""

    stages: tuple[tuple[int, ...], ...]
    ranks: tuple[Moments, ...]


def shortened(plan: Plan) -> Plan:
    """The plan for as few microbatches as tell what its ranks hold."""
    schedule = find_schedule(plan.schedule)
    if not schedule.repeats or plan.split_backward or plan.recompute.policy == "mario":
        return plan
    shape = schedule.resolve(
        pp=plan.pp,
        num_microbatches=plan.num_microbatches,
        stages_per_rank=plan.stages_per_rank,
        group=plan.group,
    )
    # An even number of ranks' rounds, so that both weight copies get their share.
    turn = shape.group or plan.pp
    left = plan.num_microbatches % turn
    short = left + turn * max(_ROUNDS, -(-_ROUNDS * plan.pp // turn))
    if short >= plan.num_microbatches:
        return plan
    return replace(plan, num_microbatches=short, group=shape.group)


def build_holdings(program: Program) -> Holdings:
    """What its lists hold."""
    stages = tuple(map(program.placement.stages_of, range(len(program.ranks))))
    return Holdings(stages, tuple(map(_moments, program.ranks, stages)))


def rank_bytes(holdings: Holdings, table: CostTable) -> tuple[int, ...]:
    """Peak per rank: weights, gradients, optimizer state and activations."""
    assert table.activation_bytes is not None
    assert table.state_bytes is not None
    full = table.activation_bytes
    shares = table.stage_input or (0.0,) * len(full)
    inputs = [share * size for share, size in zip(shares, full, strict=True)]
    result = []
    for stages, moments in zip(holdings.stages, holdings.ranks, strict=True):
        state = sum(table.state_bytes[stage] for stage in stages)
        peak = max(
            (
                sum(whole * full[stage] + kept * inputs[stage] for stage, whole, kept, _ in moment)
                for moment in moments
            ),
            default=0.0,
        )
        result.append(int(state + peak))
    return tuple(result)


def bytes_between(holdings: Holdings, memory: StageMemory) -> list[tuple[int, int]]:
    """What each rank holds at the least and at the most, messages and temporaries included.

    Which messages are there when a rank holds most, only its timed lists say: at the most those
    that it has posted receives for, one sent over each link, and some that wait.
    """
    found = []
    activations, inputs, outputs = memory.activations, memory.inputs, memory.outputs
    fixed = list(map(add, map(add, memory.parameters, memory.gradients), memory.optimizer))
    needs = list(map(max, memory.forward_temporaries, memory.backward_temporaries))
    lower = list(map(min, memory.forward_temporaries, memory.backward_temporaries))
    ends = list(map(add, outputs, (0, *outputs)))
    for stages, moments in zip(holdings.stages, holdings.ranks, strict=True):
        held = 0
        for moment in moments:
            now = 0
            for stage, whole, kept, results in moment:
                now += whole * activations[stage] + kept * inputs[stage] + results * outputs[stage]
            if now > held:
                held = now
        own, messages, largest, low, high = held, 0, 0, lower[stages[0]], 0
        for stage in stages:
            own += fixed[stage]
            messages += ends[stage]
            largest = max(largest, ends[stage])
            low, high = min(low, lower[stage]), max(high, needs[stage])
        update = own - held + step_bytes(memory, stages)
        most = own + high + messages + (RECEIVED_AHEAD + _WAITING) * largest
        found.append((max(own + low, update), max(update, most)))
    return found


def recompute_pairs(program: Program) -> tuple[dict[int, int], ...]:
    """Per rank and stage, the backwards that have something else than forwards before their own.

    Of compute lists without recomputation; before means behind the forward of the pair.
    """
    found = []
    for row in program.ranks:
        pairs: dict[int, int] = {}
        begun: dict[tuple[int, int | None], int] = {}
        others = 0
        for item in row:
            if item.kind is Kind.F:
                begun[item.stage, item.microbatch] = others
                continue
            if item.kind in BACKWARD_KINDS and begun[item.stage, item.microbatch] < others:
                pairs[item.stage] = pairs.get(item.stage, 0) + 1
            others += 1
        found.append(pairs)
    return tuple(found)


def _counted(amounts: Amounts) -> tuple[int, int, int] | None:
    """Full activations, what waits for a W among them, stage inputs, results; None for nothing."""
    full = amounts.get(Purpose.GRAPH, 0) + amounts.get(Purpose.WAITING, 0)
    inputs = amounts.get(Purpose.INPUT, 0)
    results = amounts.get(Purpose.RESULT, 0)
    return (full, inputs, results) if full or inputs or results else None


_COUNTS = {
    (kind, again): tuple(map(_counted, vector(kind, again=again)))
    for kind in KINDS
    for again in (False, True)
}


def _moments(row: Sequence[Instruction], stages: tuple[int, ...]) -> Moments:
    """What a rank holds at its worst moments: counts per stage, as ``analysis.memory`` has them."""
    again = {(item.stage, item.microbatch) for item in row if item.kind is Kind.R}
    counts = {kind: (_COUNTS[kind, False], _COUNTS[kind, True]) for kind in KINDS}
    place = {stage: index for index, stage in enumerate(stages)}
    full, inputs, results = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    moments: dict[tuple[int, ...], None] = {}
    rising = False
    for item in row:
        stage = item.stage
        index = place[stage]
        takes, frees = counts[item.kind][bool(again) and (stage, item.microbatch) in again]
        if takes:
            full[index] += takes[0]
            inputs[index] += takes[1]
            results[index] += takes[2]
            rising = True
        if frees:
            if rising:
                moments[(*full, *inputs, *results)] = None
                rising = False
            full[index] -= frees[0]
            inputs[index] -= frees[1]
            results[index] -= frees[2]
    return _at_each_stage(_not_below_another(list(moments)), stages)


def _at_each_stage(worst: Iterable[tuple[int, ...]], stages: tuple[int, ...]) -> Moments:
    count = len(stages)
    return tuple(
        tuple(
            (stage, moment[index], moment[count + index], moment[2 * count + index])
            for index, stage in enumerate(stages)
        )
        for moment in worst
    )


def _not_below_another(moments: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The moments that no other one exceeds or equals in every count; they are all different."""
    kept: list[tuple[int, ...]] = []
    larger = 0
    most = -1
    for moment in sorted(moments, key=sum, reverse=True):
        # Of as many in all, none is below another; in a steady state that is nearly all of them.
        if sum(moment) != most:
            most, larger = sum(moment), len(kept)
        if not any(all(map(le, moment, other)) for other in kept[:larger]):
            kept.append(moment)
    return kept
