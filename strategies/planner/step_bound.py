"""No order of a cut is faster than this: a bound in closed form, before anything is ordered.

On every rank: the way of the first microbatch to it, all its compute, and the way back; of the
bounds in ``strategies.analysis.bounds`` the one whose heads and tails are those of the rank's
lowest stage. Reductions and optimizer steps that must follow are added. The same holds for the
period, because the rank of stage 0 is busy from the first forward to the last gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, mul, ne

from strategies.costs.table import CostTable
from strategies.ir.program import Placement
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
    table = problem.whole_compute(layout, selective=recompute.inside)
    # Over several stages, max(I's sums, W) adds up to at least the max of the sums.
    once = table.forward[0] + min(
        table.backward[0], table.backward_input[0] + table.backward_weight[0]
    )
    if recompute.policy == "full":
        once += table.recompute[0]
    return layout.num_microbatches * once / layout.pp


def any_cut_bound(problem: Problem, layout: Layout, rules: Rules, *, selective: bool) -> float:
    """Valid for every cut into one stage per rank, and every order.

    With x of F and gradient on each rank, what lies before rank r and behind it and its own M times
    x take the step at most: x_r <= (T - x_0 - ... - x_(r-1)) / M. All x then add up to at most
    T (1 - (1 - 1/M)^P), and they add up to no less than those of the whole model.
    """
    table = problem.whole_compute(layout, selective=selective)
    whole = table.forward[0] + _backs(table, rules)[0]
    return float(whole / (1 - (1 - 1 / layout.num_microbatches) ** layout.pp))


def step_bound(
    placement: Placement, table: CostTable, rules: Rules, again: Sequence[float] = ()
) -> float:
    """A lower bound of the step time of every order of one cut; the table has reductions.

    ``again`` is what each rank recomputes, beyond what the rules say.
    """
    copies = placement.copies
    again = again or (0.0,) * placement.num_ranks
    both = map(add, table.backward_input, table.backward_weight)
    whole = list(map(add, table.forward, map(min, table.backward, both)))
    if rules.recomputes:
        whole = list(map(add, whole, table.recompute))
    if rules.flushes and len(copies) == 1:
        return _chain_bound(placement, table, rules, whole, again)
    busy = list(again)
    for index, owners in enumerate(copies):
        share = len(range(index, rules.num_microbatches, len(copies)))
        for rank, took, step in zip(owners, whole, table.step, strict=True):
            busy[rank] += share * took + step
    best = max(busy)
    return max(best, _middle_bound(placement, table, rules, again)) if rules.flushes else best


def min_recompute_time(placement: Placement, table: CostTable, rules: Rules) -> tuple[float, ...]:
    """Per rank, no more than what ``mario`` recomputes in a step; () where nothing is known.

    An R goes only where its F stands right before it, and nothing but forwards is moved in between
    it and its backward later. So only forwards run on the rank while the microbatch visits all
    stages behind: that is never so for a stage with another of the rank behind it, and together
    these visits take no longer than the rank's forwards, or the rank idles for what an R takes.
    """
    if len(placement.copies) > 1:
        return ()
    owner, microbatches = placement.copies[0], rules.num_microbatches
    through = list(map(add, table.forward, _backs(table, rules)))
    away = [*accumulate(reversed(through[1:]), initial=0.0)][::-1]  # from an F to its gradient
    forwards, again = [0.0] * placement.num_ranks, [0.0] * placement.num_ranks
    for stage, rank in enumerate(owner):
        forwards[rank] += microbatches * table.forward[stage]
        again[rank] += microbatches * table.recompute[stage]
    for rank, stage in {rank: stage for stage, rank in enumerate(owner)}.items():
        once, visit = table.recompute[stage], away[stage]
        spared = min(microbatches, forwards[rank] / visit) if visit > once else microbatches
        again[rank] -= once * spared
    return tuple(again)


def _middle_bound(
    placement: Placement, table: CostTable, rules: Rules, again: Sequence[float]
) -> float:
    """Way in to the nearest of a rank's stages, its compute, and the nearest way back.

    Of several copies of the weights: orders begin at their ends, far from a rank in the middle.
    """
    enters = [float("inf")] * placement.num_ranks
    leaves, compute = list(enters), list(again)
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
    least = map(min, gradient, table.backward)
    return list(map(add, least, table.recompute) if rules.recomputes else least)


def _ways(
    owner: tuple[int, ...], table: CostTable, rules: Rules
) -> tuple[list[float], list[float]]:
    """Per stage, what lies before its first forward, and behind its last gradient."""
    apart = map(ne, owner, owner[1:])
    hops = list(map(mul, table.hops, apart))  # of a chain: boundary s lies behind stage s
    forward = map(add, table.forward, hops)
    back = map(add, _backs(table, rules), hops)
    return [0.0, *accumulate(forward)], [0.0, *accumulate(back)]


def _chain_bound(
    placement: Placement,
    table: CostTable,
    rules: Rules,
    whole: Sequence[float],
    again: Sequence[float],
) -> float:
    """Of one weight copy.

    Way in, compute, way back to stage 0, its last reduction and step; or all compute of a rank,
    and the last reduction of one of its stages, or the steps of all.
    """
    owner, num_ranks = placement.copies[0], placement.num_ranks
    back, (way_in, way_back) = _backs(table, rules), _ways(owner, table, rules)
    compute, total, steps = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    lowest, after = [-1] * num_ranks, [float("inf")] * num_ranks
    last = list(map(add, _last_buckets(table), table.step))
    through = map(add, table.forward, back)
    each = zip(owner, through, whole, table.step, last, strict=True)
    for stage, (rank, passed, took, step, ending) in enumerate(each):
        compute[rank] += passed
        total[rank] += took
        steps[rank] += step
        if ending < after[rank]:
            after[rank] = ending
        if lowest[rank] < 0:
            lowest[rank] = stage
    end, split = last[0], table.backward[0] - table.backward_input[0]
    if rules.splits:
        end += min(table.backward_weight[0], max(0.0, split))
    microbatches, best = rules.num_microbatches, 0.0
    for rank, stage in enumerate(lowest):
        busy = microbatches * total[rank] + again[rank]
        way = way_in[stage] + microbatches * compute[rank] + again[rank] + way_back[stage] + end
        own = busy + after[rank] + (way_in[stage] if rules.waits_at_flush else 0.0)
        best = max(best, way, own, busy + steps[rank])
    return best


def _last_buckets(table: CostTable) -> list[float]:
    """Per stage, its last reduction, which follows its last gradient; its step comes then."""
    if not table.reduce:
        return [0.0] * len(table.step)
    return [buckets[-1] if buckets else 0.0 for buckets in table.reduce]
