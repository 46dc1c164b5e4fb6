"""Chooses what is recomputed in a given order: as little as a limit on full activations allows.

On a rank, a pair that keeps its activation occupies a place from its F to its B (or W), one that is
recomputed only from its R, which stands right before its B or I. Going through the list, whenever
there are too many, the pair whose backward comes last gives its place up: for pairs of equal size
that keeps as many as can be kept.
"""

from __future__ import annotations

from strategies.ir.instruction import BACKWARD_KINDS, Instruction, Kind
from strategies.ir.program import Program

Pair = tuple[int, int | None]


def keep_what_fits(program: Program, room: tuple[int, ...]) -> Program | None:
    """The program with an R before the backwards of those pairs that find no place.

    Args:
        program: Compute only: no messages, no updates, no R.
        room: Per rank, full activations that it may hold, in (stage, microbatch) pairs.

    Returns:
        None where no choice fits: the order has more backwards under way than there is room for.
    """
    rows = []
    for row, places in zip(program.ranks, room, strict=True):
        again = _given_up(row, places)
        if again is None:
            return None
        rows.append(_with_recompute(row, again))
    return program.with_ranks(tuple(rows))


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
            done = part.kind is Kind.W or (_backward(part) and _pair(part) not in split)
            if done:
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
