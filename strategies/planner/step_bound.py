"""No order of a cut is faster than this: a bound in closed form, before anything is ordered.

On every rank: the way of the first microbatch to it, all its compute, and the way back; of the
bounds in ``strategies.analysis.bounds`` the one whose heads and tails are those of the rank's
lowest stage. Reductions and optimizer steps that must follow are added. The same holds for the
period, because the rank of stage 0 is busy from the first forward to the last gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.costs.table import CostTable
from strategies.ir.placement import Placement
from strategies.plan import Recompute
from strategies.planner.problem import Layout, Problem


@dataclass(frozen=True, slots=True)
class Rules:
    """What is known of an order before it is made.

    Attributes:
        splits: Whether backwards may be split into I and W.
        recomputes: Whether every forward runs twice, the second time after its gradient came.
        waits_at_flush: Whether the makespan counts, else the period.
        flushes: Whether the pipeline drains at the end of a step.
    """

    num_microbatches: int
    splits: bool
    recomputes: bool
    waits_at_flush: bool
    flushes: bool = True


def ideal_time(problem: Problem, layout: Layout, recompute: Recompute) -> float:
    """All ranks busy all the time: valid for every cut and every order."""
    table = problem.whole_table(layout, selective=recompute.inside)
    # Over several stages, max(I's sums, W) adds up to at least the max of the sums.
    once = table.forward[0] + min(
        table.backward[0], table.backward_input[0] + table.backward_weight[0]
    )
    if recompute.policy == "full":
        once += table.recompute[0]
    return layout.num_microbatches * once / layout.pp


def step_bound(placement: Placement, table: CostTable, rules: Rules) -> float:
    """A lower bound of the step time of every order of one cut; the table has reductions."""
    copies = placement.copies
    whole = [
        f + min(b, i + w) + (r if rules.recomputes else 0.0)
        for f, b, i, w, r in zip(
            table.forward, table.backward, table.backward_input, table.backward_weight,
            table.recompute, strict=True,
        )
    ]  # fmt: skip
    busy = [0.0] * placement.num_ranks
    steps = [0.0] * placement.num_ranks
    for index, owners in enumerate(copies):
        share = len(range(index, rules.num_microbatches, len(copies)))
        for stage, rank in enumerate(owners):
            busy[rank] += share * whole[stage]
            steps[rank] += table.step[stage]
    best = max(map(float.__add__, busy, steps))
    if not rules.flushes:
        return best
    if len(copies) > 1:
        return max(best, _middle_bound(placement, table, rules))
    return max(best, _chain_bound(placement, table, rules))


def _middle_bound(placement: Placement, table: CostTable, rules: Rules) -> float:
    """Way in to the nearest of a rank's stages, its compute, and the nearest way back.

    Of several copies of the weights: orders begin at their ends, far from a rank in the middle.
    """
    enters = [float("inf")] * placement.num_ranks
    leaves, compute = list(enters), [0.0] * placement.num_ranks
    back, copies = _backs(table, rules), placement.copies
    for index, owner in enumerate(copies):
        share = len(range(index, rules.num_microbatches, len(copies)))
        way_in, way_back = _ways(owner, table, rules)
        for stage, rank in enumerate(owner):
            compute[rank] += share * (table.forward[stage] + back[stage])
            if share:
                enters[rank] = min(enters[rank], way_in[stage])
                leaves[rank] = min(leaves[rank], way_back[stage])
    return max(map(sum, zip(enters, compute, leaves, strict=True)))


def _backs(table: CostTable, rules: Rules) -> list[float]:
    """The least that a gradient takes through each stage."""
    gradient = table.backward_input if rules.splits else table.backward
    return [
        min(g, b) + (r if rules.recomputes else 0.0)
        for g, b, r in zip(gradient, table.backward, table.recompute, strict=True)
    ]


def _ways(
    owner: tuple[int, ...], table: CostTable, rules: Rules
) -> tuple[list[float], list[float]]:
    """Per stage, what lies before its first forward, and behind its last gradient."""
    hops, back, way_in, way_back = table.hops, _backs(table, rules), [0.0], [0.0]
    for stage in range(len(owner) - 1):
        hop = 0.0 if owner[stage] == owner[stage + 1] else hops[stage]
        way_in.append(way_in[-1] + table.forward[stage] + hop)
        way_back.append(way_back[-1] + back[stage] + hop)
    return way_in, way_back


def _chain_bound(placement: Placement, table: CostTable, rules: Rules) -> float:
    """Way in, compute, way back to stage 0, its last reduction and step; one weight copy."""
    owner = placement.copies[0]
    back, (way_in, way_back) = _backs(table, rules), _ways(owner, table, rules)
    compute = [0.0] * placement.num_ranks
    total = [0.0] * placement.num_ranks
    lowest = [-1] * placement.num_ranks
    after = [float("inf")] * placement.num_ranks
    for stage, rank in enumerate(owner):
        compute[rank] += table.forward[stage] + back[stage]
        extra = table.backward_input[stage] + table.backward_weight[stage]
        total[rank] += table.forward[stage] + min(table.backward[stage], extra)
        total[rank] += table.recompute[stage] if rules.recomputes else 0.0
        after[rank] = min(after[rank], _after_last_gradient(table, stage))
        if lowest[rank] < 0:
            lowest[rank] = stage
    end = _after_last_gradient(table, 0)
    if rules.splits:
        end += min(table.backward_weight[0], max(0.0, table.backward[0] - table.backward_input[0]))
    microbatches = rules.num_microbatches
    best = 0.0
    for rank, stage in enumerate(lowest):
        through = way_in[stage] + microbatches * compute[rank] + way_back[stage] + end
        own = microbatches * total[rank] + after[rank]
        if rules.waits_at_flush:
            own += way_in[stage]
        best = max(best, through, own)
    return best


def _after_last_gradient(table: CostTable, stage: int) -> float:
    """A stage's last bucket and its optimizer step, which follow its last gradient."""
    buckets = table.reduce[stage] if table.reduce else ()
    return (buckets[-1] if buckets else 0.0) + table.step[stage]
