"""Time and memory of a candidate, by the quick walk or its whole program; or why it has none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from strategies.analysis.late_verdict import agreed
from strategies.analysis.memory import RankMemory, peak_bytes, peak_memory
from strategies.compiler import compile_plan
from strategies.costs.table import Costs
from strategies.ir.program import Program
from strategies.plan import NO_RECOMPUTE, Plan, Recompute
from strategies.planner.cut import skips
from strategies.planner.group import Group
from strategies.planner.holdings import (
    Holdings,
    build_holdings,
    bytes_between,
    rank_bytes,
    rank_memory,
    rebuilt_pairs,
    shortened,
)
from strategies.planner.problem import Candidate, Found, Layout, Order
from strategies.planner.quick_walk import StepTime, Structure, flatten, lists_of, step_time
from strategies.planner.step_bound import Rules, step_bound
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
        key = (self._candidate(group, order), limit)
        if key not in self.found.needed:
            self.found.needed[key] = self._needed_bytes(group, order, limit)
        return self.found.needed[key]

    def least_bytes(self, group: Group, order: Order) -> int:
        """No more than the worst rank needs; 0 where nothing is known before its lists are made.

        Of ``mario`` what ``full`` holds. Its passes move forwards only to the front and keep the
        order of backwards: before each backward at least as many forwards have run, and each has
        left its input at least.
        """
        memory = group.table.memory
        known = memory is not None and not needs_program(group, order)
        if group.recompute.policy != "mario" or not known:
            return 0
        assert memory is not None
        if any(map(int.__gt__, memory.inputs, memory.activations)):
            return 0
        full = replace(group, recompute=Recompute("full"))
        return max(low for low, _ in bytes_between(self.holdings(full, order), memory))

    def least_time(self, group: Group, order: Order) -> float:
        """No more than a step takes, where the order says more than its group's bound; else 0.

        Of ``mario``: an R goes only where its F comes to stand right before it. Its passes move
        nothing but forwards, to the front, so what stands between the two and is no forward stays.
        """
        if group.recompute.policy != "mario" or needs_program(group, order):
            return 0.0
        if find_schedule(order.schedule).cost_aware:
            return 0.0  # The order itself is searched for.
        plain = replace(group, recompute=NO_RECOMPUTE)
        plan = plan_of(plain, order)
        key = _key(plain, order, plan)
        if key not in self.found.rebuilt:
            self.found.rebuilt[key] = rebuilt_pairs(self._lists(plain, order, plan))
        took = group.table.recompute
        again = [
            sum(number * took[stage] for stage, number in pairs.items())
            for pairs in self.found.rebuilt[key]
        ]
        splits = find_schedule(order.schedule).splits_backward or group.split_backward
        rules = Rules(plan.num_microbatches, splits, False, self.waits_at_flush)
        return step_bound(group.placement, group.table, rules, again)

    def is_near(self, group: Group, order: Order, limit: int) -> bool:
        """Whether only lists with messages say if it fits."""
        bounds = self._bytes_between(group, order)
        return max(low for low, _ in bounds) <= limit < max(high for _, high in bounds)

    def is_short(self, group: Group, order: Order) -> bool:
        """Whether its time is known as soon as what it needs."""
        if needs_program(group, order):
            return False
        plan = plan_of(group, order)
        short = shortened(plan).num_microbatches == plan.num_microbatches
        return short or _key(group, order, plan) in self.found.structures

    def _bytes_between(self, group: Group, order: Order) -> list[tuple[int, int]]:
        memory = group.table.memory
        if memory is None or needs_program(group, order):
            return [(0, 0)]
        known, key = self.found.between, self._candidate(group, order)
        if key not in known:
            known[key] = bytes_between(self.holdings(group, order), memory)
        return known[key]

    def _needed_bytes(self, group: Group, order: Order, limit: int) -> int:
        if group.table.memory is None or needs_program(group, order):
            return max(held.total for held in self.full_memory(group, order))
        bounds = self._bytes_between(group, order)
        least = max(low for low, _ in bounds)
        if least > limit:
            return least
        near = [rank for rank, (_, high) in enumerate(bounds) if high > limit]
        if not near:
            return max(high for _, high in bounds)
        plan = shortened(plan_of(group, order))
        structure = self._structure(group, order, plan)
        lists = self._lists(group, order, plan)
        return max(held.total for held in rank_memory(plan, group.table, near, lists, structure))

    def full_memory(self, group: Group, order: Order) -> tuple[RankMemory, ...]:
        """What each rank holds at its worst moment, messages and temporaries included.

        Raises:
            PlanError: recompute=optimal finds no order.
        """
        key = self._candidate(group, order)
        if key not in self.found.memory:
            if needs_program(group, order):
                program = program_of(group, order)
                found = peak_memory(program, group.costs.table(program))
                assert found is not None
            else:
                plan = shortened(plan_of(group, order))
                lists = self._lists(group, order, plan)
                structure = self._structure(group, order, plan)
                found = rank_memory(plan, group.table, None, lists, structure)
            self.found.memory[key] = found
        return self.found.memory[key]

    def _candidate(self, group: Group, order: Order) -> object:
        """All that decides what it holds."""
        return (
            group.layout, group.placement, group.units, group.overlap, group.recompute,
            group.split_backward, order,
        )  # fmt: skip

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
        key, known = self._candidate(group, order), self.found.times
        if key not in known:
            structure = self.structure(group, order)
            known[key] = step_time(structure, group.table, overlap=group.overlap != "none")
        return known[key]

    def structure(self, group: Group, order: Order) -> Structure:
        return self._structure(group, order, plan_of(group, order))

    def _structure(self, group: Group, order: Order, plan: Plan) -> Structure:
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
