"""What a step takes at least: an order's makespan in the simulator, with messages for free."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.overhead_ranks import Steady, between, durations
from strategies.compiler import compile_plan
from strategies.costs.table import CostTable
from strategies.costs.uniform import UniformCosts
from strategies.ir.program import Program
from strategies.plan import Plan, ScheduleFile
from strategies.simulator.engine import simulate, unroll


@dataclass(frozen=True, slots=True)
class _WholeFirstBackward:
    """torch leaves all of the first stage's backward to W where it splits."""

    uniform: UniformCosts

    def table(self, program: Program) -> CostTable:
        table = self.uniform.table(program)
        return replace(
            table,
            backward_input=(0.0, *table.backward_input[1:]),
            backward_weight=(table.backward[0], *table.backward_weight[1:]),
        )


def critical_path(
    schedule: str, *, ranks: int, num_microbatches: int, forward: float, order: str | None = None
) -> float:
    """Makespan for F = I = W at zero latency, in the unit of ``forward``.

    Args:
        schedule: Our name.
        ranks: P.
        num_microbatches: M.
        forward: F per rank and microbatch.
        order: torch's own compute order as CSV, in place of our schedule's; with the durations
            that torch's halves of a backward have.
    """
    costs = UniformCosts(forward=forward, backward=2 * forward)
    if order is None:
        plan = Plan(schedule, pp=ranks, num_microbatches=num_microbatches, buckets=0)
        return simulate(compile_plan(plan).train, costs).makespan
    plan = Plan(
        "custom",
        pp=ranks,
        num_microbatches=num_microbatches,
        buckets=0,
        file=ScheduleFile(f"torch's {schedule}", order),
    )
    return simulate(compile_plan(plan).train, _WholeFirstBackward(costs)).makespan


def steady_period(
    schedule: str, *, ranks: int, num_microbatches: int, costs: UniformCosts
) -> float:
    """From step to step where nobody waits at a barrier."""
    plan = Plan(schedule, pp=ranks, num_microbatches=num_microbatches, buckets=0)
    program = compile_plan(plan).train
    if program.updates is not None:
        return simulate(program, costs).period
    *_, before, last = unroll(program, costs, steps=6)
    return max(max(row) for row in last.end) - max(max(row) for row in before.end)


def measured_costs(found: Sequence[Steady], stages: float) -> UniformCosts:
    """Milliseconds per rank and microbatch, of ``stages`` on each; means over the ranks.

    All of one step before: a message takes what those have taken that a rank has waited for, and an
    instruction besides what passes until the next one begins where nothing was waited for.
    """
    each = [durations(rank.marks) for rank in found]
    link = found[0].link
    gaps = between([rank.marks for rank in found], link)
    more = statistics.median(gaps.rest) if gaps.rest else 0.0

    def mean(kind: str) -> float:
        took = [rank[kind] for rank in each if kind in rank]
        return 1e3 * stages * (statistics.fmean(took) + more)

    took = statistics.median(gaps.messages) - more if gaps.messages else link
    message = 1e3 * max(0.0, took)  # On a busy machine what passes in between may be longer.
    forward = mean("F")
    if any("I" in took for took in each):
        inputs, weights = mean("I"), mean("W")
        return UniformCosts(forward, inputs + weights, inputs, p2p=message)
    return UniformCosts(forward, mean("B"), p2p=message)
