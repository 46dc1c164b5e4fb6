"""Time and memory of a candidate, by the quick walk or its whole program; or why it has none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add, mul
from typing import Literal

from strategies.analysis.late_verdict import with_update_barrier
from strategies.analysis.memory import (
    RECEIVED_AHEAD,
    RankMemory,
    Sizes,
    pair_bytes,
    peak_bytes,
    peak_memory,
    peak_memory_bytes,
    step_bytes,
    worst_counts,
)
from strategies.compiler import compile_plan
from strategies.costs.capacity import capacity
from strategies.costs.table import Costs, CostTable, StageMemory
from strategies.ir.kinds import BACKWARD_KINDS, Kind
from strategies.ir.program import Program, recomputed_pairs
from strategies.lowering.send_recv import add_messages
from strategies.plan import NO_RECOMPUTE, Plan, Recompute
from strategies.planner.cut import skips
from strategies.planner.group import Group
from strategies.planner.problem import Candidate, Layout, Order, Problem, memo
from strategies.planner.step_bound import Rules, step_bound
from strategies.planner.step_time import (
    OrderGraph,
    StepTime,
    build_order_graph,
    compute_program,
    step_time,
)
from strategies.schedules import find_schedule
from strategies.simulator.engine import simulate


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate, simulated.

    Attributes:
        step_time_s: Period, or makespan where ranks wait for each other at the flush.
        rank_bytes: Peak per rank: state and activations, or all where it says so.
        recomputes: Whether its program has an R.
    """

    group: Group
    order: Order
    step_time_s: float
    rank_bytes: tuple[int, ...]
    recomputes: bool = False

    @property
    def candidate(self) -> Candidate:
        return self.group.candidate(self.order)

    @property
    def plan(self) -> Plan:
        """The same for the compiler."""
        return plan_of(self.group, self.order)

    @property
    def peak_bytes(self) -> int:
        return max(self.rank_bytes)


Reason = Literal["memory", "slower", "same"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A layout under a policy of which no candidate is listed.

    Attributes:
        reason: ``memory``: it does not fit; ``slower``: than the last one listed; ``same``: it
            recomputes nothing, so it is the program without recomputation.
        needed_bytes: On the worst rank; None where it fits, or where no order was found.
        step_time_s: A step's time; None where it was not simulated.
        exact: Whether the figure is the program's own, or a lower bound.
    """

    layout: Layout
    recompute: Recompute
    reason: Reason
    needed_bytes: int | None = None
    step_time_s: float | None = None
    exact: bool = True


# --------------------------------------------------------------------------------------- evaluation
# Of one candidate of a problem; each result is computed once.


def evaluate(problem: Problem, group: Group, order: Order, *, buffers: bool = False) -> Outcome:
    """Its time, state and activations; with ``buffers`` messages and temporaries, too.

    Raises:
        PlanError: recompute=optimal finds no order.
    """
    waits = problem.machine.waits_at_flush
    if needs_program(group, order):
        program = program_of(group, order)
        time = program_step(program, group.costs, waits=waits)
        found = Outcome(group, order, time, (), bool(recomputed_pairs(program)))
        return replace(found, rank_bytes=program_bytes(program, group, buffers=buffers))
    known = times(problem, group, order)
    time = known.makespan if waits else known.period
    if buffers:
        held = tuple(rank.total for rank in full_memory(problem, group, order))
    else:
        held = rank_bytes(_worst(problem, _few(group, order)), group.table)
    return Outcome(group, order, time, held, group.recompute.rewrites)


@memo
def times(problem: Problem, group: Group, order: Order) -> StepTime:
    """Of a candidate that needs no program."""
    found = structure(problem, lists_plan(group, order))
    return step_time(found, group.table, overlap=group.overlap != "none")


@memo
def needed_bytes(problem: Problem, group: Group, order: Order, limit: int) -> int:
    """What the worst rank needs, messages and temporaries included.

    Exact where it is close to the limit, else on the same side of it.
    """
    if group.table.memory is None or needs_program(group, order):
        return max(held.total for held in full_memory(problem, group, order))
    bounds = _bytes_between(problem, group, order)
    least = max(low for low, _ in bounds)
    if least > limit:
        return least
    near = [rank for rank, (_, high) in enumerate(bounds) if high > limit]
    if not near:
        return max(high for _, high in bounds)
    return max(held.total for held in _messaged_memory(group, order, near))


@memo
def full_memory(problem: Problem, group: Group, order: Order) -> tuple[RankMemory, ...]:
    """What each rank holds at its worst moment, messages and temporaries included."""
    if not needs_program(group, order):
        return _messaged_memory(group, order)
    program = program_of(group, order)
    found = peak_memory(program, group.costs.table(program))
    assert found is not None
    return found


def _messaged_memory(
    group: Group, order: Order, ranks: Sequence[int] | None = None
) -> tuple[RankMemory, ...]:
    """Of its lists with their messages, unverified."""
    program = add_messages(_lists(_few(group, order)), group.table)
    found = peak_memory(program, group.table, ranks)
    assert found is not None
    return found


def least_bytes(problem: Problem, group: Group, order: Order) -> int:
    """No more than the worst rank needs; 0 where nothing is known before its lists are made.

    Lower bound for ``mario``: the peak of ``full``. Mario only moves forwards earlier, so at every
    backward at least as many stage inputs are alive.
    """
    memory = group.table.memory
    if group.recompute.policy != "mario" or memory is None or needs_program(group, order):
        return 0
    if any(map(int.__gt__, memory.inputs, memory.activations)):
        return 0
    full = replace(group, recompute=Recompute("full"))
    return max(low for low, _ in _bytes_between(problem, full, order))


def least_time(problem: Problem, group: Group, order: Order) -> float:
    """No more than a step takes, where the order says more than its group's bound; else 0.

    Of ``mario``: an R goes only where its F comes to stand right before it. Its passes move nothing
    but forwards, to the front, so what stands between the two and is no forward stays.
    """
    if group.recompute.policy != "mario" or needs_program(group, order):
        return 0.0
    if find_schedule(order.schedule).cost_aware:
        return 0.0  # The order itself is searched for.
    plan = lists_plan(replace(group, recompute=NO_RECOMPUTE), order)
    took = group.table.recompute
    again = [
        sum(number * took[stage] for stage, number in pairs.items())
        for pairs in _rebuilt(problem, plan)
    ]
    splits = find_schedule(order.schedule).splits_backward or group.split_backward
    rules = Rules(plan.num_microbatches, splits, False, problem.machine.waits_at_flush)
    return step_bound(group.placement, group.table, rules, again)


def is_near(problem: Problem, group: Group, order: Order, limit: int) -> bool:
    """Whether only lists with messages say if it fits."""
    bounds = _bytes_between(problem, group, order)
    return max(low for low, _ in bounds) <= limit < max(high for _, high in bounds)


def is_short(problem: Problem, group: Group, order: Order) -> bool:
    """Whether its time is known as soon as what it needs."""
    if needs_program(group, order):
        return False
    plan = lists_plan(group, order)
    return shortened(plan) is plan or (structure, (plan,)) in problem.store


@memo
def _bytes_between(problem: Problem, group: Group, order: Order) -> list[tuple[int, int]]:
    memory = group.table.memory
    if memory is None or needs_program(group, order):
        return [(0, 0)]
    return bytes_between(_worst(problem, _few(group, order)), memory)


def _few(group: Group, order: Order) -> Plan:
    """The candidate with as few microbatches as tell what its ranks hold."""
    return shortened(lists_plan(group, order))


@memo
def _worst(problem: Problem, plan: Plan) -> Worst:
    return worst_moments(_lists(plan))


@memo
def _rebuilt(problem: Problem, plan: Plan) -> tuple[dict[int, int], ...]:
    return recompute_pairs(_lists(plan))


@memo
def structure(problem: Problem, plan: Plan) -> OrderGraph:
    """A plan's lists, walked."""
    return build_order_graph(_lists(plan))


@lru_cache(maxsize=1)
def _lists(plan: Plan) -> Program:
    """They take much memory; several questions about one candidate follow each other."""
    return compute_program(plan)


def lists_plan(group: Group, order: Order) -> Plan:
    """What decides a candidate's compute lists: one plan for all that have the same."""
    schedule = find_schedule(order.schedule)
    made = schedule.cost_aware or group.recompute.policy == "mario" or group.split_backward
    plan = Plan(
        order.schedule,
        group.layout.pp,
        group.layout.num_microbatches,
        order.stages_per_rank,
        order.group,
        "none",
        split_backward=group.split_backward,
        costs=group.costs if made else None,
        recompute=group.recompute if group.recompute.rewrites else NO_RECOMPUTE,
    )
    if order.schedule == "foldx_fifo" and plan.num_microbatches > plan.pp:
        return replace(plan, schedule="interleaved_1f1b", group=plan.pp)
    if order.schedule != "interleaved_1f1b":
        return plan
    return replace(plan, group=schedule.resolve(plan).group)


def program_step(program: Program, costs: Costs, *, waits: bool) -> float:
    """A step's time; ``waits``: ranks wait for each other at the flush, or at every update."""
    if program.updates is None:
        timeline = simulate(program, costs)
        return timeline.makespan if waits else timeline.period
    return simulate(with_update_barrier(program) if waits else program, costs).period


def plan_of(group: Group, order: Order) -> Plan:
    """What the compiler gets for one of a group's candidates."""
    layout = group.layout
    return Plan(
        order.schedule,
        layout.pp,
        layout.num_microbatches,
        order.stages_per_rank,
        order.group,
        group.overlap,
        group.buckets,
        split_backward=group.split_backward,
        costs=group.costs,
        memory_bytes=capacity(
            group.costs.hardware, tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep
        ).room,
        recompute=group.recompute,
        skips=skips(group.costs.handed),
    )


def program_of(group: Group, order: Order) -> Program:
    """The very program of a run, which resolves to an equal plan."""
    inside = tuple(each.layers for each in group.table.exchange)
    plan = replace(plan_of(group, order), exchanges=inside if any(inside) else ())
    return compile_plan(plan).train


def program_bytes(program: Program, group: Group, *, buffers: bool = True) -> tuple[int, ...]:
    """Peak of each rank; without ``buffers`` state and activations."""
    peak = peak_memory_bytes if buffers else peak_bytes
    held = peak(program, group.costs.table(program))
    return tuple(value for value in held if value is not None)


def needs_program(group: Group, order: Order) -> bool:
    """Whether the quick walk does not cover it: fused pairs, waiting sends, long skips.

    Nor what waits for its W and is more than was kept, as of layers that are run again; nor a
    program of several batches.
    """
    if not find_schedule(order.schedule).synchronous:
        return True
    pairs = group.table.fused < 1.0 and find_schedule(order.schedule).weight_copies > 1
    waits = group.costs.transport == "rendezvous"
    past = bool(skips(group.costs.handed))  # tensors that pass by stages
    grows = group.recompute.policy == "layer"
    return pairs or waits or past or grows or group.recompute.policy == "optimal"


# ------------------------------------------------------------------------------------ worst moments
# A search asks about the memory of one order with dozens of cuts. So each list is walked once, and
# where lists repeat themselves every few microbatches, so does what a rank holds: of a thousand
# microbatches a few rounds tell it.

_WAITING = 8  # Messages that have arrived early on the worst rank: more than was ever seen.
_ROUNDS = 2
"""Rounds of microbatches after which no rank holds more than before."""

Worst = list[tuple[tuple[int, ...], list[tuple[int, ...]]]]
"""Of each rank its stages, and its counts at moments of which none is below another in all."""


def shortened(plan: Plan) -> Plan:
    """The plan for as few microbatches as tell what its ranks hold."""
    schedule = find_schedule(plan.schedule)
    if not schedule.repeats or plan.split_backward or plan.recompute.policy == "mario":
        return plan
    shape = schedule.resolve(plan)
    # An even number of ranks' rounds, so that both weight copies get their share.
    turn = shape.group or plan.pp
    left = plan.num_microbatches % turn
    short = left + turn * max(_ROUNDS, -(-_ROUNDS * plan.pp // turn))
    if short >= plan.num_microbatches:
        return plan
    return replace(plan, num_microbatches=short, group=shape.group)


def worst_moments(program: Program) -> Worst:
    ranks = range(len(program.ranks))
    return [(program.placement.stages_of(rank), worst_counts(program, rank)) for rank in ranks]


def _most(worst: Iterable[Sequence[int]], sizes: Sequence[float]) -> float:
    return max((sum(map(mul, counts, sizes)) for counts in worst), default=0)


def rank_bytes(worst: Worst, table: CostTable) -> tuple[int, ...]:
    """Peak per rank: weights, gradients, optimizer state and activations."""
    full, state = table.activation_bytes, table.state_bytes
    assert full is not None
    assert state is not None
    sizes = Sizes.whole(full, list(map(mul, table.stage_input, full)))
    return tuple(
        int(sum(state[stage] for stage in stages) + _most(found, sizes.of(stages)))
        for stages, found in worst
    )


def bytes_between(worst: Worst, memory: StageMemory) -> list[tuple[int, int]]:
    """What each rank holds at the least and at the most, messages and temporaries included.

    Which messages are there when a rank holds most, only its timed lists say: at the most those
    that it has posted receives for, one sent over each link, and some that wait.
    """
    found, sizes = [], pair_bytes(memory)
    fixed = list(map(add, map(add, memory.parameters, memory.gradients), memory.optimizer))
    needs = list(map(max, memory.forward_temporaries, memory.backward_temporaries))
    lower = list(map(min, memory.forward_temporaries, memory.backward_temporaries))
    ends = list(map(add, memory.outputs, (0, *memory.outputs)))
    for stages, counts in worst:
        state = sum(fixed[stage] for stage in stages)
        own = state + int(_most(counts, sizes.of(stages)))
        crossing = [ends[stage] for stage in stages]
        update = state + step_bytes(memory, stages)
        most = own + max(needs[stage] for stage in stages)
        most += sum(crossing) + (RECEIVED_AHEAD + _WAITING) * max(crossing)
        least = own + min(lower[stage] for stage in stages)
        found.append((max(least, update), max(update, most)))
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
