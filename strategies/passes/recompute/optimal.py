"""Recomputes no more than a memory limit demands, in an order made for it.

Several orders (``starts``) are timed, with as few pairs recomputed as fit
(``recompute_to_fit``), and a local search improves those that are not much slower than the
schedule's own. The fastest result
wins, of equal ones that with less recomputation. What the search makes of an order does not depend
on which other orders there are, so one order more never makes the result slower.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import count
from math import floor

from strategies.analysis.bounds import lower_bound, memory_bound
from strategies.costs.table import CostTable
from strategies.errors import PlanError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, Kind
from strategies.ir.program import Program, recomputed_pairs
from strategies.ir.verify import verify
from strategies.passes.recompute.local_search import improve, makespan
from strategies.passes.recompute.starts import (
    forwards_early,
    preposed,
    sibling_orders,
    weights_at_once,
    weights_in_time,
)

_PROMISING = 1.03  # Over the fastest of the own orders: the slowest that the search begins with.
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
    own = recompute_to_fit(program, room)
    if not reorder:
        if own is None:
            raise _too_small(program, room)
        return verify(own)
    bound = lower_bound(program, table).value
    if own == program and makespan(program, table) <= bound * (1 + _SAME):
        return program
    share = 1.0 / program.placement.stages_per_microbatch
    caps = tuple(share * places for places in room)
    goal = max(bound, memory_bound(program, table, caps).value)
    found: list[tuple[float, int, Program]] = []
    unit = max(table.forward)
    for start in _starts(program, table, room):
        order = improve(start, table, room, goal=goal)
        took = makespan(order, table)
        found.append((round(took / unit, 7), len(recomputed_pairs(order)), order))
        if took <= goal * (1 + _SAME):
            break
    return verify(min(found, key=lambda each: each[:2])[2])


def _starts(program: Program, table: CostTable, room: tuple[int, ...]) -> list[Program]:
    """Orders with what must be recomputed: the schedule's own, and siblings not much slower.

    One order does not push another out: how slow is too slow depends on the own orders alone.
    """
    rows = zip(program.ranks, room, strict=True)
    tight = [_choose_recomputed(row, places) != set() for row, places in rows]
    early = forwards_early(program, table, tight)
    ahead = preposed(program, table)
    timely = [weights_in_time(order, room) for order in (program, ahead)]
    own = _fitted([program, ahead, *timely, early], room)
    timed = {order: makespan(order, table) for order in own}
    slowest = _PROMISING * min(timed.values())
    timed |= {order: makespan(order, table) for order in _fitted(sibling_orders(program), room)}
    return [order for order, took in timed.items() if took <= slowest]


def _fitted(orders: list[Program], room: tuple[int, ...]) -> list[Program]:
    """With what must be recomputed, as they are and with each W right behind its I."""
    variants = [each for order in orders for each in (order, weights_at_once(order))]
    fitted = [recompute_to_fit(order, room) for order in dict.fromkeys(variants)]
    return [order for order in fitted if order is not None]


def _too_small(program: Program, room: tuple[int, ...]) -> PlanError:
    """For an order that has several backwards under way at once, as late Ws do."""
    ranks, crossed = len(room), program.placement.stages_per_microbatch
    least = min(room)
    places = next(n for n in count(least) if recompute_to_fit(program, (n,) * ranks) is not None)
    return PlanError(
        f"recompute=optimal: {program.schedule} keeps the order of its file, which has "
        f"{places} backwards under way on a rank at once; each needs its whole activation, and "
        f"there is room for {least}. Try recompute.max_full_activations={places / crossed:g}."
    )


# ---------------------------------------------------------------------------------- kept intervals
# As little is recomputed in a given order as a limit on full activations allows.
#
# On a rank, a pair that keeps its activation occupies a place from its F to its B (or W), one that
# is recomputed only from its R, which stands right before its B or I. Going through the list,
# whenever there are too many, the pair whose backward comes last gives its place up: for pairs of
# equal size that keeps as many as can be kept.

Pair = tuple[int, int | None]


def recompute_to_fit(program: Program, room: tuple[int, ...]) -> Program | None:
    """The program with an R before the backwards of those pairs that find no place.

    ``room`` is per rank, in pairs. None where no choice fits: the order has more backwards under
    way than there is room for.
    """
    rows = []
    for row, places in zip(program.ranks, room, strict=True):
        again = _choose_recomputed(row, places)
        if again is None:
            return None
        rows.append(_with_recompute(row, again))
    return program.with_ranks(tuple(rows))


def recompute_periodically(program: Program, room: tuple[int, ...], period: int) -> Program:
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


def _choose_recomputed(row: tuple[Instruction, ...], places: int) -> set[Pair] | None:
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
