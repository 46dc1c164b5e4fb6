"""Candidates that share a cut, its costs and one lower bound: all schedules of one placement."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from strategies.costs.analytic import AnalyticCosts
from strategies.costs.table import CostTable
from strategies.ir.program import Placement
from strategies.plan import Overlap, Plan, Recompute
from strategies.planner.cut import MemoryLimit, balance_ranks, cut_chain
from strategies.planner.problem import (
    Candidate,
    Layout,
    Order,
    PlannedCosts,
    Problem,
    draft,
    memo,
)
from strategies.planner.space import Space, orders
from strategies.planner.step_bound import Rules, any_cut_bound, min_recompute_time, step_bound
from strategies.schedules import find_schedule


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates of one layout that differ in their schedules only.

    Of one problem, what is compared decides all the rest.

    Attributes:
        overlap: When gradients are reduced.
        units: Units per stage.
        table: Durations and bytes, reductions included.
        buckets: Per stage.
        bound: None of them is faster.
        least_bytes: What the worst rank holds at the least.
    """

    layout: Layout
    placement: Placement
    overlap: Overlap
    recompute: Recompute
    split_backward: bool
    units: tuple[int, ...]
    orders: tuple[Order, ...] = field(compare=False)
    costs: PlannedCosts = field(compare=False)
    table: CostTable = field(compare=False)
    buckets: tuple[int, ...] = field(compare=False)
    bound: float = field(compare=False)
    least_bytes: int = field(compare=False)

    def candidate(self, order: Order) -> Candidate:
        return Candidate(self.layout, order, self.overlap, self.units, self.recompute)


@dataclass(frozen=True, slots=True)
class Sketch:
    """A cut with compute times only.

    Its bound prunes most layouts before messages, reductions and memory are computed.

    Attributes:
        units: Per stage; None for the fastest cut that leaves room, which has not been looked for.
        bound: No candidate is faster.
    """

    layout: Layout
    recompute: Recompute
    placement: Placement
    rules: Rules
    orders: tuple[Order, ...]
    units: tuple[int, ...] | None
    bound: float


@memo
def sketches(problem: Problem, space: Space, layout: Layout, recompute: Recompute) -> list[Sketch]:
    """All candidates of a layout."""
    found = []
    listed = tuple(orders(space, problem, layout, recompute))
    for (placement, splits, flushes), members in _by_placement(
        listed, layout.pp, layout.num_microbatches
    ):
        rules = Rules(
            layout.num_microbatches,
            splits or space.split_backward,
            recompute.policy == "full",
            problem.machine.waits_at_flush,
            flushes,
        )
        of = (layout, recompute, placement, rules, members)
        units = _fastest_cut(problem, space, layout, placement, recompute)
        found.append(
            Sketch(*of, units, _compute_bound(problem, layout, placement, units, recompute, rules))
        )
        if _wants_room(problem, space, layout, placement, recompute, units):
            bound = any_cut_bound(problem, layout, rules, selective=recompute.inside)
            found.append(Sketch(*of, None, bound if flushes else 0.0))
    return found


def _compute_bound(
    problem: Problem, layout: Layout, placement: Placement, units: tuple[int, ...],
    recompute: Recompute, rules: Rules,
) -> float:  # fmt: skip
    costs = _costs(problem, layout, units, recompute.inside)
    if not isinstance(costs, AnalyticCosts):
        return 0.0
    table = costs.compute_only()
    return step_bound(placement, table, rules, _again(placement, table, recompute, rules))


def _again(
    placement: Placement, table: CostTable, recompute: Recompute, rules: Rules
) -> tuple[float, ...]:
    """What each rank recomputes at least, beyond what the rules say."""
    return min_recompute_time(placement, table, rules) if recompute.policy == "mario" else ()


def groups(problem: Problem, space: Space, layout: Layout, recompute: Recompute) -> list[Group]:
    """All groups of a layout."""
    drawn = sketches(problem, space, layout, recompute)
    return [group for sketch in drawn for group in groups_of(problem, space, sketch)]


@memo
def groups_of(problem: Problem, space: Space, sketch: Sketch) -> list[Group]:
    """One for each time at which gradients may be reduced; none where no cut leaves room."""
    found: list[Group] = []
    layout, recompute, placement = sketch.layout, sketch.recompute, sketch.placement
    units = sketch.units or _leaner_cut(problem, layout, selective=recompute.inside)
    if units is None:
        return found
    for overlap in space.overlaps(layout):
        costs, table, buckets = _figures(
            problem, layout, placement, units, overlap, selective=recompute.inside
        )
        again = _again(placement, table, recompute, sketch.rules)
        found.append(
            Group(
                layout, placement, overlap, recompute, space.split_backward, units,
                sketch.orders, costs, table, buckets,
                step_bound(placement, table, sketch.rules, again),
                _least_bytes(layout, placement, table, recompute),
            )
        )  # fmt: skip
    return found


@lru_cache(maxsize=1024)
def _by_placement(
    listed: tuple[Order, ...], pp: int, num_microbatches: int
) -> tuple[tuple[tuple[Placement, bool, bool], tuple[Order, ...]], ...]:
    """Orders that share a placement, whether they split backwards, and whether they drain."""
    found: dict[tuple[Placement, bool, bool], list[Order]] = {}
    for order in listed:
        schedule = find_schedule(order.schedule)
        plan = Plan(order.schedule, pp, num_microbatches, order.stages_per_rank, order.group)
        shape = schedule.resolve(plan)
        key = (schedule.place(shape), schedule.splits_backward, schedule.synchronous)
        found.setdefault(key, []).append(order)
    return tuple((key, tuple(members)) for key, members in found.items())


def _figures(
    problem: Problem,
    layout: Layout,
    placement: Placement,
    units: tuple[int, ...],
    overlap: Overlap,
    *,
    selective: bool,
) -> tuple[PlannedCosts, CostTable, tuple[int, ...]]:
    """Costs, durations and buckets of a cut, which all policies share that rerun whole stages."""
    costs = _costs(problem, layout, units, selective)
    return costs, *_table(problem, layout, placement, units, overlap == "zero1", selective)


@memo
def _costs(
    problem: Problem, layout: Layout, units: tuple[int, ...], selective: bool
) -> PlannedCosts:
    return problem.costs(layout, units, selective=selective)


@memo
def _table(
    problem: Problem, layout: Layout, placement: Placement, units: tuple[int, ...], zero1: bool,
    selective: bool,
) -> tuple[CostTable, tuple[int, ...]]:  # fmt: skip
    """Of a program that has no reductions yet, and its buckets."""
    costs, program = _costs(problem, layout, units, selective), draft(placement)
    if not zero1:
        buckets = problem.buckets(costs, placement)
        return costs.table_for(program, buckets, frozenset()), buckets
    table, buckets = _table(problem, layout, placement, units, False, selective)
    shared = frozenset(stage for stage, n in enumerate(buckets) if n)
    if isinstance(costs, AnalyticCosts):
        return costs.with_sharded_optimizer(table, program, buckets, shared), buckets
    return costs.table_for(program, buckets, shared), buckets


def with_recompute(group: Group, problem: Problem, recompute: Recompute) -> Group:
    """The same cut and schedules under another policy; its bound is not computed again."""
    selective = recompute.inside
    if group.recompute.inside == selective:
        return replace(group, recompute=recompute)
    costs, table, buckets = _figures(
        problem, group.layout, group.placement, group.units, group.overlap, selective=selective
    )
    return replace(group, recompute=recompute, costs=costs, table=table, buckets=buckets)


def _fastest_cut(
    problem: Problem, space: Space, layout: Layout, placement: Placement, recompute: Recompute
) -> tuple[int, ...]:
    """Of one sequence's times; larger microbatches only scale them."""
    if space.units is not None:
        return space.units
    single = replace(layout.of_units, microbatch_size=problem.least_size)
    owner, ratio = placement.copies[0], space.balance_ratio
    if ratio is None and placement.num_stages > placement.num_ranks:
        return _even(problem, single, owner, recompute.inside)
    return _balanced(problem, single, len(owner), ratio, recompute.inside)


@memo
def _balanced(
    problem: Problem, layout: Layout, num_stages: int, ratio: float | None, selective: bool
) -> tuple[int, ...]:
    times = _times(problem.unit_table(layout, selective=selective))
    sent = [float(load.output_elements) for load in problem.units(layout)]
    alike = problem.graph is None and ratio is None
    cut = cut_chain(times, num_stages, sent=None if alike else sent, balance_ratio=ratio or 0.0)
    assert cut is not None  # orders() lists no more stages than units
    return cut


@memo
def _even(
    problem: Problem, layout: Layout, owner: tuple[int, ...], selective: bool
) -> tuple[int, ...]:
    times = _times(problem.unit_table(layout, selective=selective))
    return balance_ranks(_balanced(problem, layout, len(owner), None, selective), times, owner)


def _shared(placement: Placement) -> bool:
    """Whether a rank has several stages."""
    return placement.weight_copies > 1 or placement.num_stages > placement.num_ranks


def _wants_room(
    problem: Problem, space: Space, layout: Layout, placement: Placement, recompute: Recompute,
    fastest: tuple[int, ...],
) -> bool:  # fmt: skip
    """Whether the fastest cut seems to hold too much where another might not."""
    if space.units is not None or _shared(placement) or recompute.rewrites:
        return False
    return not _room(problem, layout, selective=recompute.inside).holds(fastest)


def _leaner_cut(problem: Problem, layout: Layout, *, selective: bool) -> tuple[int, ...] | None:
    """The fastest cut into one stage per rank that leaves room; None where there is none."""
    times = _times(problem.unit_table(layout, selective=selective))
    return cut_chain(times, layout.pp, room=_room(problem, layout, selective=selective))


def _room(problem: Problem, layout: Layout, *, selective: bool) -> MemoryLimit:
    table = problem.unit_table(layout, selective=selective)
    assert table.state_bytes is not None
    assert table.activation_bytes is not None
    stages = range(layout.pp)
    return MemoryLimit(
        tuple(map(float, table.state_bytes)),
        tuple(map(float, table.activation_bytes)),
        tuple(float(min(layout.pp - stage, layout.num_microbatches)) for stage in stages),
        (float(problem.room(layout)),) * layout.pp,
    )


def cut_again(
    problem: Problem, space: Space, group: Group, order: Order, rank_bytes: tuple[int, ...]
) -> Group | None:
    """A group of one order, cut for what its ranks hold beside their units; None for no other cut.

    Buffers of messages and what a stage takes for a while are known of a program only.

    ``rank_bytes``: what the program of this group and order holds at its worst, per rank.
    """
    layout, placement, selective = group.layout, group.placement, group.recompute.inside
    if space.units is not None or _shared(placement) or group.recompute.rewrites:
        return None
    room = _room(problem, layout, selective=selective)
    held = [rank_bytes[rank] for rank in placement.copies[0]]
    beside = [max(0.0, all_ - own) for all_, own in zip(held, room.taken(group.units), strict=True)]
    limits = tuple(limit - much for limit, much in zip(room.limits, beside, strict=True))
    times = _times(problem.unit_table(layout, selective=selective))
    units = cut_chain(times, layout.pp, room=replace(room, limits=limits))
    if units is None or units == group.units:
        return None
    costs, table, buckets = _figures(
        problem, layout, placement, units, group.overlap, selective=selective
    )
    schedule = find_schedule(order.schedule)
    splits = schedule.splits_backward or group.split_backward
    waits = problem.machine.waits_at_flush
    rules = Rules(layout.num_microbatches, splits, False, waits, schedule.synchronous)
    return replace(
        group, units=units, orders=(order,), costs=costs, table=table, buckets=buckets,
        bound=step_bound(placement, table, rules, ()),
        least_bytes=_least_bytes(layout, placement, table, group.recompute),
    )  # fmt: skip


def _times(table: CostTable) -> list[float]:
    # What was measured may be nothing; a cut asks for more.
    return [max(f + b, 1e-12) for f, b in zip(table.forward, table.backward, strict=True)]


def _least_bytes(
    layout: Layout, placement: Placement, table: CostTable, recompute: Recompute
) -> int:
    """What the worst rank holds at the least: its state, and what one microbatch keeps.

    That is in all of its stages before its first backward, or where stages run again in one.
    """
    assert table.activation_bytes is not None
    assert table.state_bytes is not None
    state, whole = [0] * placement.num_ranks, [0] * placement.num_ranks
    for copy, owners in enumerate(placement.copies):
        kept = [0] * placement.num_ranks
        each = zip(owners, table.state_bytes, table.activation_bytes, strict=True)
        for rank, fixed, held in each:
            state[rank] += fixed
            if not recompute.rewrites:
                kept[rank] += held
            elif held > kept[rank]:
                kept[rank] = held
        if copy < layout.num_microbatches:
            whole = list(map(max, whole, kept))
    return max(map(int.__add__, state, whole))


# ----------------------------------------------------------------------------------- expected peak
# What zero-bubble orders hold by their papers: enough to leave some out before making them.
#
# Making such an order takes up to seconds; that most of them do not fit is known beforehand. Only
# O2 goes by it, and only where the formula misses the memory by a margin, because an order made for
# given costs may hold somewhat less.

_MARGIN = 0.85


def expected_bytes(group: Group, order: Order, space: Space) -> int | None:
    """A little less than the worst rank's peak by the formula; None where there is none.

    zb_h1 and zb_v hold P microbatches on every rank, zb_h2 2 (P - r) - 1 on rank r
    (Qi et al., 2023, https://arxiv.org/abs/2401.10241, and 2024, https://arxiv.org/abs/2405.15362).
    """
    known = order.schedule in ("zb_h1", "zb_h2", "zb_v")
    if space.level != "O2" or space.schedule is not None or not known:
        return None
    if group.recompute.rewrites:
        return None
    assert group.table.activation_bytes is not None
    assert group.table.state_bytes is not None
    layout = group.layout
    ranks = [0.0] * layout.pp
    for stage, rank in enumerate(group.placement.copies[0]):
        held = min(_held(order.schedule, layout.pp, stage), layout.num_microbatches)
        ranks[rank] += group.table.state_bytes[stage]
        ranks[rank] += _MARGIN * held * group.table.activation_bytes[stage]
    return int(max(ranks))


def _held(schedule: str, pp: int, stage: int) -> int:
    """Microbatches that a stage holds; in V shape a rank's two stages share 2 P of them."""
    if schedule == "zb_h2":
        return 2 * (pp - stage) - 1
    return pp if schedule == "zb_h1" else 2 * pp - stage
