"""Recomputes no more than a memory limit demands, in an order made for it.

Three kinds of orders are timed: the schedule's own, with as few pairs recomputed as fit
(``keep_what_fits``), those of other schedules on the same placement (``sibling_orders``), and
generated ones that know the limit from the start (``capped_walk``). In short programs small moves
improve the best of them. The fastest one wins, of equal ones the one with less recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain as joined
from itertools import count, pairwise
from math import floor
from typing import NamedTuple

from strategies.analysis.bounds import lower_bound, memory_bound
from strategies.costs.table import CostTable
from strategies.errors import PlanError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, Kind
from strategies.ir.program import Program, chain, recomputed_pairs
from strategies.ir.verify import verify
from strategies.passes.recompute.capped_walk import Order, R, Work, best_orders
from strategies.passes.recompute.critical_moves import improve, is_short
from strategies.passes.recompute.list_clock import ListClock, list_makespan
from strategies.schedules import SCHEDULES, Schedule
from strategies.schedules.search.lanes import F, I, Lanes, W, lanes_of

# Generated orders that small moves start from, and how often what they have found starts again.
_GENERATED = 2
_ROUNDS = 4
_STARTS = 4  # Orders that small moves begin with.
_SHARE = 0.6  # Of the budget for generated orders, where they are not all there is.
# Microbatches by which a forward one stage up comes later: where neighbours share a rank, the
# oldest go first; round a loop half a microbatch per stage does better.
_SLOPES = {True: 0.01, False: 0.5}
_SAME = 1e-9


def recompute_within(
    program: Program, table: CostTable, room: tuple[int, ...], *, reorder: bool = True
) -> Program:
    """The fastest program found that holds no more full activations than there is room for.

    The program has no messages, no updates, no R; its own order is one candidate. ``room`` is per
    rank, in (stage, microbatch) pairs, at least 1. Without ``reorder`` only what is recomputed may
    change.

    Raises:
        PlanError: ``reorder`` is off and the order itself needs more room.
    """
    own = keep_what_fits(program, room)
    if own is None and not reorder:
        raise _too_small(program, room)
    candidates = [] if own is None else [_Timed.of(own, table)]
    if own is not None and own.ranks == program.ranks:
        bound = lower_bound(program, table).value
        if candidates[0].makespan <= bound * (1 + _SAME):
            return program
    if reorder:
        candidates += _reordered(program, table, room)
    unit = max(table.forward)
    ranked = [(round(c.makespan / unit, 7), len(recomputed_pairs(c.program))) for c in candidates]
    return verify(candidates[ranked.index(min(ranked))].program)


class _Timed(NamedTuple):
    makespan: float
    program: Program

    @classmethod
    def of(cls, program: Program, table: CostTable) -> _Timed:
        return cls(list_makespan(program, table), program)


def _too_small(program: Program, room: tuple[int, ...]) -> PlanError:
    """For an order that has several backwards under way at once, as late Ws do."""
    ranks, crossed = len(room), program.placement.stages_per_microbatch
    asked = min(room)
    places = next(n for n in count(asked) if keep_what_fits(program, (n,) * ranks) is not None)
    return PlanError(
        f"recompute=optimal: {program.schedule} keeps the order of its file, which has "
        f"{places} backwards under way on a rank at once; each needs its whole activation, and "
        f"there is room for {asked}. Try recompute.max_full_activations={places / crossed:g}."
    )


def _reordered(program: Program, table: CostTable, room: tuple[int, ...]) -> list[_Timed]:
    """Generated orders, and what small moves make of them and of the schedule's own."""
    share = 1.0 / program.placement.stages_per_microbatch
    caps = tuple(share * places for places in room)
    goal = max(lower_bound(program, table).value, memory_bound(program, table, caps).value)
    short = is_short(program)
    siblings = sibling_orders(program, every=short)
    found = [
        candidate
        for order in (program, *siblings)
        for candidate in _fitted(order, room, every=short)
    ]
    timed = [_Timed.of(candidate, table) for candidate in found]
    least = min(timed, key=lambda c: c.makespan, default=None)
    # Of a long program, an order that fits as it is is not improved by one that recomputes.
    enough = not short and least is not None and not recomputed_pairs(least.program)
    if not enough and (least is None or least.makespan > goal * (1 + _SAME)):
        generated = _generated(program, table, room, goal, others=bool(siblings))
        timed += [_Timed.of(candidate, table) for candidate in generated]
    best = sorted(timed, key=lambda c: c.makespan)[:_STARTS]
    for seed in range(_ROUNDS if short else 0):
        if min(c.makespan for c in best) <= goal * (1 + _SAME):
            break
        moved = [improve(start.program, table, room, goal=goal, seed=seed) for start in best]
        best = sorted((_Timed.of(m, table) for m in moved), key=lambda c: c.makespan)
        best = best[: max(1, len(best) - 1)]
    return timed + best


def _fitted(order: Program, room: tuple[int, ...], *, every: bool) -> list[Program]:
    """An order with what must be recomputed, as it is and with each W right behind its I."""
    own = keep_what_fits(order, room)
    if own is not None and not every:
        return [own]
    early = keep_what_fits(weights_at_once(order), room)
    return [found for found in dict.fromkeys((own, early)) if found is not None]


def _generated(
    program: Program, table: CostTable, room: tuple[int, ...], goal: float, *, others: bool
) -> list[Program]:
    """Orders made for the limit; fewer are tried where other schedules have some."""
    placement, lanes = program.placement, lanes_of(program.placement, program.num_microbatches)
    # Long skips wait for what neighbours have passed on before; the walk need not know them.
    neighbours = chain(placement.num_stages)
    assert program.boundaries[: len(neighbours)] == neighbours
    split = any(part.kind is Kind.I for row in program.ranks for i in row for part in i.parts)
    turns = [_turns(program, table)]
    short = is_short(program)
    share = _SHARE if short or others else 1.0
    if short and placement.weight_copies == 1 and placement.num_stages > placement.num_ranks:
        turns.append(_oldest_first(program))
    hops = table.hops[: len(neighbours)]

    backward = table.backward_input if split else table.backward
    kinds = (table.forward, backward, table.backward_weight, table.recompute)
    work = Work(
        lanes=lanes,
        took=tuple(tuple(kind[stage] for stage in lanes.stage) for kind in kinds),
        hop=tuple((*hops, 0.0)[stage] for stage in lanes.stage),
        turn=(),
        room=room,
        split=split,
    )
    orders = [
        order
        for turn in turns
        for order in best_orders(
            replace(work, turn=tuple(turn)),
            goal=goal,
            share=share / len(turns),
            wanted=_GENERATED if short else 1,
        )
    ]
    return [program.with_ranks(_rows(lanes, order)) for order in orders]


def _turns(program: Program, table: CostTable) -> list[tuple[float, ...]]:
    """When each forward begins in the schedule's own order, per lane and index."""
    clock = ListClock(program, table)
    starts: dict[tuple[int, int], float] = {}
    for node, item in enumerate(clock.items):
        for part in item.parts:
            if part.kind is Kind.F:
                assert part.microbatch is not None
                starts[part.stage, part.microbatch] = clock.start[node]
    lanes = lanes_of(program.placement, program.num_microbatches)
    copies = program.placement.weight_copies
    return [
        tuple(
            starts[lanes.stage[lane], index * copies + lane // lanes.num_stages]
            for index in range(size)
        )
        for lane, size in enumerate(lanes.size)
    ]


def _oldest_first(program: Program) -> list[tuple[float, ...]]:
    """Other turns for ranks with several stages in line: more or less a microbatch at a time."""
    lanes = lanes_of(program.placement, program.num_microbatches)
    owners = program.placement.copies[0]
    slope = _SLOPES[any(first == second for first, second in pairwise(owners))]
    return [
        tuple(index + slope * stage for index in range(size))
        for stage, size in zip(lanes.stage, lanes.size, strict=True)
    ]


def _rows(lanes: Lanes, order: Order) -> tuple[tuple[Instruction, ...], ...]:
    """As instructions; an R right behind its F goes, as in ``remove_redundancy``."""
    whole = not any(kind == W for row in order.steps for kind, _, _ in row)
    kinds = {F: Kind.F, I: Kind.B if whole else Kind.I, W: Kind.W, R: Kind.R}
    rows = []
    for row in order.steps:
        items: list[Instruction] = []
        before: Sequence[int] = ()
        for kind, lane, index in row:
            if kind != R or before != (F, lane, index):
                microbatch = index * lanes.num_copies + lane // lanes.num_stages
                items.append(Instruction(kinds[kind], lanes.stage[lane], microbatch))
            before = (kind, lane, index)
        rows.append(tuple(items))
    return tuple(rows)


# ---------------------------------------------------------------------------------- kept intervals
# As little is recomputed in a given order as a limit on full activations allows.
#
# On a rank, a pair that keeps its activation occupies a place from its F to its B (or W), one that
# is recomputed only from its R, which stands right before its B or I. Going through the list,
# whenever there are too many, the pair whose backward comes last gives its place up: for pairs of
# equal size that keeps as many as can be kept.

Pair = tuple[int, int | None]


def keep_what_fits(program: Program, room: tuple[int, ...]) -> Program | None:
    """The program with an R before the backwards of those pairs that find no place.

    ``room`` is per rank, in pairs. None where no choice fits: the order has more backwards under
    way than there is room for.
    """
    rows = []
    for row, places in zip(program.ranks, room, strict=True):
        again = _given_up(row, places)
        if again is None:
            return None
        rows.append(_with_recompute(row, again))
    return program.with_ranks(tuple(rows))


def keep_in_turn(program: Program, room: tuple[int, ...], period: int) -> Program:
    """The same for F and B in turn without a flush, alike in every ``period`` of microbatches.

    Of d pairs under way on a rank, a forward that is run again has d - 1 behind it, of which all
    but one place may be taken: at most room - 1 of any d - 1 neighbours are kept. Spread evenly,
    the most that a period may have by that are.
    """
    rows = []
    for rank, (row, places) in enumerate(zip(program.ranks, room, strict=True)):
        behind = program.placement.num_ranks - 1 - rank
        share = Fraction(places - 1, behind) if behind >= places else Fraction(1)
        kept = floor(share * period)
        rows.append(
            _with_recompute(
                row,
                {
                    _pair(item)
                    for item in row
                    if item.kind is Kind.F and not _in_turn(item.microbatch or 0, kept, period)
                },
            )
        )
    return program.with_ranks(tuple(rows))


def _in_turn(number: int, kept: int, period: int) -> bool:
    """Whether it is one of so many that are spread evenly over a period."""
    return (number % period + 1) * kept // period > number % period * kept // period


def weights_at_once(program: Program) -> Program:
    """Each W right behind its I, where it holds least."""
    rows = []
    for row in program.ranks:
        items: list[Instruction] = []
        for item in row:
            if item.kind is not Kind.W:
                items.append(item)
            for part in item.parts:
                if part.kind is Kind.I:
                    items.append(Instruction(Kind.W, part.stage, part.microbatch))
        rows.append(tuple(items))
    return program.with_ranks(tuple(rows))


def _given_up(row: tuple[Instruction, ...], places: int) -> set[Pair] | None:
    backward = {_pair(p): i for i, item in enumerate(row) for p in item.parts if _backward(p)}
    split = {_pair(part) for item in row for part in item.parts if part.kind is Kind.I}
    again: set[Pair] = set()
    kept: set[Pair] = set()
    under_way: set[Pair] = set()
    for place, item in enumerate(row):
        for part in item.parts:
            pair = _pair(part)
            if part.kind is Kind.F:
                kept.add(pair)
            elif _backward(part):
                under_way.add(pair)
                kept.discard(pair)
        while len(kept) + len(under_way) > places:
            waiting = [pair for pair in kept if backward[pair] > place]
            if not waiting:
                return None
            last = max(waiting, key=backward.__getitem__)
            kept.remove(last)
            again.add(last)
        for part in item.parts:
            if part.kind is Kind.W or (_backward(part) and _pair(part) not in split):
                under_way.discard(_pair(part))
    return again


def _with_recompute(row: tuple[Instruction, ...], again: set[Pair]) -> tuple[Instruction, ...]:
    result: list[Instruction] = []
    for item in row:
        result += [
            Instruction(Kind.R, part.stage, part.microbatch)
            for part in item.parts
            if _backward(part) and _pair(part) in again
        ]
        result.append(item)
    return tuple(result)


def _pair(part: Instruction) -> Pair:
    return part.stage, part.microbatch


def _backward(part: Instruction) -> bool:
    return part.kind in BACKWARD_KINDS


# ---------------------------------------------------------------------------------- sibling orders
# Orders of other schedules on the same placement. One that holds little by itself (v_min, v_half)
# needs less recomputation under a small limit than one that is faster without any, and its regular
# order is one that small moves do not find.

# Of long programs: the order that holds least of all.
_LEAN = ("v_min",)
_ALL = (
    *_LEAN, "v_half", "zb_v", "zb_h1", "zb_h2", "interleaved_zb", "hanayo", "gpipe", "1f1b",
    "eager_1f1b", "interleaved_1f1b", "looped_bfs", "foldx_fifo", "foldx_aiao", "chimera",
)  # fmt: skip


def sibling_orders(program: Program, *, every: bool) -> list[Program]:
    """Other schedules' orders of the same stages, microbatches and kinds of backwards.

    All schedules are asked (``every``), or only those that are there for memory. Orders made for
    costs are taken as they are for equal ones, which are quickly made.
    """
    kinds = {part.kind for row in program.ranks for item in row for part in item.parts}
    found: dict[tuple[tuple[Instruction, ...], ...], Program] = {}
    for name in _ALL if every else _LEAN:
        schedule = SCHEDULES.get(name)
        if schedule is None or not schedule.synchronous or name == program.schedule:
            continue
        rows = _sibling_rows(schedule, program)
        if rows is None or rows == program.ranks or rows in found:
            continue
        if {part.kind for item in joined(*rows) for part in item.parts} == kinds:
            found[rows] = program.with_ranks(rows)
    return list(found.values())


def _sibling_rows(
    schedule: Schedule, program: Program
) -> tuple[tuple[Instruction, ...], ...] | None:
    """The schedule's lists; None where it has other stages or rules against the numbers."""
    placement = program.placement
    splits = any(item.kind is Kind.W for row in program.ranks for item in row)
    stages = placement.num_stages // placement.num_ranks
    if placement.weight_copies > 1:
        stages = schedule.stages_per_rank
    if schedule.virtual_stages and stages == 1:
        return None  # Of one stage per rank, orders made for several are others' orders.
    if schedule.splits_backward != splits or schedule.weight_copies != placement.weight_copies:
        return None
    try:
        shape = schedule.resolve(
            pp=placement.num_ranks,
            num_microbatches=program.num_microbatches,
            stages_per_rank=stages,
            group=None,
        )
        if schedule.place(shape) != placement:
            return None
        return tuple(tuple(row) for row in schedule.order(shape))
    except PlanError:
        return None
