"""Time and memory of a candidate, by the quick walk or its whole program; or why it has none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from strategies.analysis.late_verdict import agreed
from strategies.analysis.memory import RankMemory, peak_bytes, peak_memory
from strategies.compiler import compile_plan
from strategies.costs.table import Costs
from strategies.ir.program import Program
from strategies.plan import Plan, Recompute
from strategies.planner.group import Group
from strategies.planner.holdings import (
    Holdings,
    build_holdings,
    bytes_between,
    rank_bytes,
    rank_memory,
    shortened,
)
from strategies.planner.problem import Candidate, Found, Layout, Order
from strategies.planner.quick_walk import StepTime, Structure, flatten, lists_of, step_time
from strategies.planner.unit_graph import skips
from strategies.schedules import find_schedule
from strategies.simulator.engine import simulate


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate, simulated.

    Attributes:
        plan: The same for the compiler.
        step_time_s: Period, or makespan where ranks wait for each other at the flush.
        rank_bytes: Peak per rank: state and activations, or all where it says so.
        bound_s: The group's lower bound.
        group: What it shares with others.
        recomputes: Whether its program has an R; known of whole programs only.
    """

    candidate: Candidate
    plan: Plan
    step_time_s: float
    rank_bytes: tuple[int, ...]
    bound_s: float
    group: Group
    recomputes: bool = False

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


@dataclass
class Evaluator:
    """Simulates candidates; orders that do not depend on costs are walked once."""

    waits_at_flush: bool  # Whether the makespan counts, else the period.
    num_simulated: int = 0
    found: Found = field(default_factory=Found)

    def rank_bytes(self, group: Group, order: Order) -> tuple[int, ...]:
        """State and activations."""
        if needs_program(group, order):
            return _known(program_of(group, order), group)
        return rank_bytes(self.holdings(group, order), group.table)

    def needed_bytes(self, group: Group, order: Order, limit: int) -> int:
        """What the worst rank needs, messages and temporaries included.

        Exact where it is close to the limit, else on the same side of it.

        Raises:
            PlanError: recompute=optimal finds no order.
        """
        memory = group.table.memory
        if memory is None or needs_program(group, order):
            return max(held.total for held in full_memory(group, order))
        bounds = bytes_between(self.holdings(group, order), memory)
        least = max(low for low, _ in bounds)
        if least > limit:
            return least
        near = [rank for rank, (_, high) in enumerate(bounds) if high > limit]
        if not near:
            return max(high for _, high in bounds)
        plan = shortened(plan_of(group, order))
        lists = self._lists(group, order, plan)
        return max(held.total for held in rank_memory(plan, group.table, near, lists))

    def holdings(self, group: Group, order: Order) -> Holdings:
        """Of a candidate that needs no program."""
        plan = shortened(plan_of(group, order))
        key = _key(group, order, plan)
        if key not in self.found.holdings:
            self.found.holdings[key] = build_holdings(plan, self._lists(group, order, plan))
        return self.found.holdings[key]

    def outcome(self, group: Group, order: Order) -> Outcome:
        self.num_simulated += 1
        if needs_program(group, order):
            program = program_of(group, order)
            time = program_step(program, group.costs, waits=self.waits_at_flush)
            held = _known(program, group)
        else:
            times = self.times(group, order)
            time = times.makespan if self.waits_at_flush else times.period
            held = self.rank_bytes(group, order)
        plan = plan_of(group, order)
        return Outcome(group.candidate(order), plan, time, held, group.bound, group)

    def times(self, group: Group, order: Order) -> StepTime:
        """Of a candidate that needs no program."""
        structure = self.structure(group, order)
        return step_time(structure, group.table, overlap=group.overlap != "none")

    def structure(self, group: Group, order: Order) -> Structure:
        plan = plan_of(group, order)
        key = _key(group, order, plan)
        if key not in self.found.structures:
            self.found.structures[key] = flatten(self._lists(group, order, plan))
        return self.found.structures[key]

    def _lists(self, group: Group, order: Order, plan: Plan) -> Program:
        """A plan's compute lists; of one candidate several questions are asked in turn."""
        key = _key(group, order, plan)
        if not self.found.lists or self.found.lists[0][0] != key:
            self.found.lists[:] = [(key, lists_of(plan))]
        return self.found.lists[0][1]


def program_step(program: Program, costs: Costs, *, waits: bool) -> float:
    """A step's time; ``waits``: ranks wait for each other at the flush, or at every update."""
    if program.per_batch is None:
        timeline = simulate(program, costs)
        return timeline.makespan if waits else timeline.period
    return simulate(agreed(program) if waits else program, costs).period


def full_memory(group: Group, order: Order) -> tuple[RankMemory, ...]:
    """What each rank holds at its worst moment, messages and temporaries included.

    Raises:
        PlanError: recompute=optimal finds no order.
    """
    if needs_program(group, order):
        program = program_of(group, order)
        found = peak_memory(program, group.costs.table(program))
        assert found is not None
        return found
    plan = plan_of(group, order)
    return rank_memory(plan, group.table)


def _key(group: Group, order: Order, plan: Plan) -> object:
    """All that decides the lists of a plan."""
    cost_aware = find_schedule(order.schedule).cost_aware
    cost_aware = cost_aware or group.recompute.policy == "mario"
    cost_aware = cost_aware or group.split_backward
    return (
        _lists(order, plan),
        plan.pp,
        plan.num_microbatches,
        group.recompute if group.recompute.rewrites else None,
        plan.costs if cost_aware else None,
    )


def _lists(order: Order, plan: Plan) -> Order:
    """One order for all that have the same lists."""
    if order.schedule == "interleaved_1f1b":
        shape = find_schedule(order.schedule).resolve(
            pp=plan.pp,
            num_microbatches=plan.num_microbatches,
            stages_per_rank=order.stages_per_rank,
            group=plan.group,
        )
        return replace(order, group=shape.group)
    if order.schedule == "foldx_fifo" and plan.num_microbatches > plan.pp:
        return Order("interleaved_1f1b", order.stages_per_rank, plan.pp)
    return order


def plan_of(group: Group, order: Order) -> Plan:
    """What the compiler gets for one of a group's candidates."""
    return Plan(
        order.schedule,
        group.layout.pp,
        group.layout.num_microbatches,
        order.stages_per_rank,
        order.group,
        group.overlap,
        group.buckets,
        split_backward=group.split_backward,
        costs=group.costs,
        memory_bytes=int(group.costs.hardware.memory_gb * 1e9),
        recompute=group.recompute,
        skips=skips(group.costs.handed),
    )


def program_of(group: Group, order: Order) -> Program:
    """The very program of a run, which resolves to an equal plan."""
    inside = tuple(layers for layers, _ in group.table.exchanging)
    plan = replace(plan_of(group, order), exchanges=inside if any(inside) else ())
    return compile_plan(plan).train


def _known(program: Program, group: Group) -> tuple[int, ...]:
    held = peak_bytes(program, group.costs.table(program))
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
