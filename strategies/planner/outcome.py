"""Time and memory of a candidate, by the quick walk or its whole program; or why it has none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from strategies.analysis.memory import peak_bytes
from strategies.compiler import compile_plan
from strategies.ir.program import Program
from strategies.plan import Plan, Recompute
from strategies.planner.group import Group
from strategies.planner.problem import Candidate, Layout, Order
from strategies.planner.quick_walk import Structure, build_structure, rank_bytes, step_time
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
        recomputes: Whether its program has an R; known of whole programs only.
    """

    candidate: Candidate
    plan: Plan
    step_time_s: float
    rank_bytes: tuple[int, ...]
    bound_s: float
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
    structures: dict[object, Structure] = field(default_factory=dict)

    def rank_bytes(self, group: Group, order: Order) -> tuple[int, ...]:
        if _needs_program(group, order):
            return _known(program_of(group, order), group)
        return rank_bytes(self._structure(group, order), group.table)

    def outcome(self, group: Group, order: Order) -> Outcome:
        self.num_simulated += 1
        if _needs_program(group, order):
            program = program_of(group, order)
            timeline = simulate(program, group.costs)
            time = timeline.makespan if self.waits_at_flush else timeline.period
            held = _known(program, group)
        else:
            structure = self._structure(group, order)
            times = step_time(structure, group.table, overlap=group.overlap != "none")
            time = times.makespan if self.waits_at_flush else times.period
            held = rank_bytes(structure, group.table)
        return Outcome(group.candidate(order), plan_of(group, order), time, held, group.bound)

    def _structure(self, group: Group, order: Order) -> Structure:
        plan = plan_of(group, order)
        cost_aware = find_schedule(order.schedule).cost_aware
        cost_aware = cost_aware or group.recompute.policy == "mario"
        cost_aware = cost_aware or group.split_backward
        key = (
            order,
            group.layout.pp,
            group.layout.num_microbatches,
            group.recompute if group.recompute.rewrites else None,
            plan.costs if cost_aware else None,
        )
        if key not in self.structures:
            self.structures[key] = build_structure(plan)
        return self.structures[key]


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
    return compile_plan(plan_of(group, order)).train


def _known(program: Program, group: Group) -> tuple[int, ...]:
    held = peak_bytes(program, group.costs.table(program))
    return tuple(value for value in held if value is not None)


def _needs_program(group: Group, order: Order) -> bool:
    """Whether the quick walk does not cover it: two weight copies, waiting sends, long skips."""
    two_copies = find_schedule(order.schedule).weight_copies > 1
    waits = group.costs.transport == "rendezvous"
    past = bool(skips(group.costs.handed))  # tensors that pass by stages
    return two_copies or waits or past or group.recompute.policy == "optimal"
