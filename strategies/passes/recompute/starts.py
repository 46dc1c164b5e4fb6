"""Orders that ``recompute=optimal`` begins with, all of the same stages and microbatches.

Three variants of the program's own order, and those of all other schedules on the same placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from strategies.costs.table import CostTable
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, Kind
from strategies.ir.program import Program
from strategies.ir.verify import verify
from strategies.passes.recompute.local_search import TimedLists, prepose_forward
from strategies.passes.recompute.mario import (
    apply_checkpoint,
    overlap_recompute,
    remove_redundancy,
)
from strategies.plan import Plan
from strategies.schedules import SCHEDULES, Schedule

Pair = tuple[int, int | None]  # stage, microbatch


def preposed(program: Program, table: CostTable) -> Program:
    """Forwards as early as Mario moves them where all is recomputed, without its Rs."""
    moved = prepose_forward(remove_redundancy(overlap_recompute(apply_checkpoint(program))), table)
    return program.with_ranks(
        tuple(tuple(item for item in row if item.kind is not Kind.R) for row in moved.ranks)
    )


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


def weights_in_time(program: Program, room: tuple[int, ...]) -> Program:
    """Ws earlier where an F or an I needs their places, the oldest first; the others stay."""
    rows = []
    for row, places in zip(program.ranks, room, strict=True):
        weights = {(i.stage, i.microbatch): i for i in row if i.kind is Kind.W}
        items: list[Instruction] = []
        kept: set[Pair] = set()  # Pairs that hold a place.
        waiting: list[Pair] = []  # Those of them that wait for their W.
        for item in row:
            if item.kind is Kind.W and (item.stage, item.microbatch) not in waiting:
                continue
            pairs = {(p.stage, p.microbatch) for p in item.parts if p.kind in (Kind.F, Kind.I)}
            while pairs and waiting and len(kept | pairs) > places:
                items.append(weights[waiting[0]])
                kept.remove(waiting.pop(0))
            items.append(item)
            for part in item.parts:
                pair = part.stage, part.microbatch
                if part.kind is Kind.I or (part.kind is Kind.F and len(kept) < places):
                    kept.add(pair)
                if part.kind is Kind.I and pair in weights:
                    waiting.append(pair)
                elif part.kind is Kind.W:
                    waiting.remove(pair)
                if part.kind in GRADIENT_KINDS:
                    kept.discard(pair)
        rows.append(tuple(items))
    return program.with_ranks(tuple(rows))


def forwards_early(program: Program, table: CostTable, tight: Sequence[bool]) -> Program:
    """On ``tight`` ranks a forward runs whenever no backward can; others keep their lists.

    A tight rank, one that has to recompute, takes of each stage's Fs, backwards and Ws the next one
    of its list: what can start first, of those a backward, then a W. Fused pairs stay as they are.
    """
    if any(item.halves for row in program.ranks for item in row):
        return program
    lists = TimedLists(program, table)
    took, needs = list(lists.took), [list(need) for need in lists.needs]
    turn = [0] * len(took)
    for before, after, later in (
        (lists.forward, lists.backward, 0),
        (lists.backward, lists.weight, 1),
        ({}, lists.forward, 2),
    ):
        for pair, number in after.items():
            turn[number] = later
            if pair in before:
                needs[number].append((before[pair], 0.0))
    readers: list[list[int]] = [[] for _ in took]  # Ranks on which an instruction is waited for.
    queues: list[list[list[int]]] = []  # Per rank, next instruction last.
    for rank, row in enumerate(lists.rows):
        found: dict[object, list[int]] = {}
        for number in reversed(row):
            item = lists.items[number]
            found.setdefault((item.kind, item.stage) if tight[rank] else 0, []).append(number)
            for need, _ in needs[number]:
                readers[need].append(rank)
            if tight[rank] and turn[number] == 0:
                took[number] += took[lists.recompute[lists.pairs[number][0]]]
        queues.append(list(found.values()))
    end = [inf] * len(took)
    rows: list[list[int]] = [[] for _ in queues]

    def next_of(rank: int) -> tuple[float, int, int, int]:
        """(start, turn, number, its queue) of what the rank runs next, as far as known."""
        free = end[rows[rank][-1]] if rows[rank] else 0.0
        return min(
            (
                (max(free, *(end[n] + hop for n, hop in needs[q[-1]]), 0.0), turn[q[-1]], q[-1], i)
                for i, q in enumerate(queues[rank])
                if q
            ),
            default=(inf, 0, 0, 0),
        )

    upcoming = [next_of(rank) for rank in range(len(queues))]
    for _ in range(sum(map(len, lists.rows))):
        rank = upcoming.index(min(upcoming))
        start, _, number, queue = upcoming[rank]
        queues[rank][queue].pop()
        rows[rank].append(number)
        end[number] = start + took[number]
        for stale in {rank, *readers[number]}:
            upcoming[stale] = next_of(stale)
    return lists.program(rows)


# ---------------------------------------------------------------------------------- sibling orders
# One that holds little by itself (v_min, v_half) needs less recomputation under a small limit than
# one that is faster without any, and its regular order is one that small moves do not find.


def sibling_orders(program: Program) -> list[Program]:
    """Orders of all other registered schedules on the same placement, with the same backwards.

    Orders made for costs are taken as they are for equal ones, which are quickly made.
    """
    kinds = _kinds(program)
    siblings = [
        _sibling(schedule, program)
        for name, schedule in SCHEDULES.items()
        if schedule.synchronous
        and schedule.splits_backward == (Kind.W in kinds)
        and name != program.schedule
    ]
    found = [order for order in dict.fromkeys(siblings) if order is not None]
    return [order for order in found if order != program and _kinds(order) == kinds]


def _kinds(program: Program) -> set[Kind]:
    return {item.kind for row in program.ranks for item in row}


def _sibling(schedule: Schedule, program: Program) -> Program | None:
    """The schedule's order; None where it has other stages or rules against the numbers."""
    placement = program.placement
    stages = placement.num_stages // placement.num_ranks
    if placement.weight_copies > 1:
        stages = schedule.stages_per_rank
    if schedule.virtual_stages and stages == 1:
        return None  # Of one stage per rank, orders made for several are others' orders.
    try:
        shape = schedule.resolve(
            Plan(schedule.name, placement.num_ranks, program.num_microbatches, stages)
        )
        if schedule.place(shape) != placement:
            return None
        return verify(program.with_ranks(tuple(map(tuple, schedule.order(shape)))))
    except Exception:  # A user's schedule may not be made for these numbers.
        return None
