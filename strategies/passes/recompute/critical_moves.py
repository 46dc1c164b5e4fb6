"""Improves a finished order by small moves on what holds it up.

Generated orders follow rules; the last few percent are exceptions to them. Again and again, an
instruction of the longest chain moves a few places towards the front of its list, or one before it
towards the end, or a pair begins or ceases to be recomputed. What is not slower and keeps within
the room stays, and now and then something a little slower. Bounded by a count and always the same,
as in ``capped_walk``; worth it for programs of a few hundred instructions only: of 26 steps of 3
and 4 ranks (B = 2F, one to three full activations) 9 are 2 to 7 % shorter with it, most of them of
``interleaved_1f1b`` and ``zb_h1``.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import exp
from random import Random

from strategies.costs.table import CostTable
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, Kind
from strategies.ir.program import Program, recomputed_pairs

# Instructions whose times are computed in all, about a tenth of a second's worth.
_BUDGET = 500_000
_LEAST_TRIES = 400  # Programs too long for that many tries are left as they are.
_FAR = 5
_HEAT = 0.2  # Of a forward: how much slower a move may be at first.
_F, _R, _B, _W = range(4)


def improve(
    program: Program, table: CostTable, room: tuple[int, ...], *, goal: float, seed: int = 0
) -> Program:
    """The program, or a faster one that holds no more full activations than there is room for.

    ``program`` has F, R, and B or I and W of every pair, no fused pairs; ``room`` is per rank, in
    pairs. The search ends at an order of makespan ``goal``: none is faster. ``seed`` says which of
    the ways to go.
    """
    if not is_short(program) or any(item.halves for row in program.ranks for item in row):
        return program
    tries = _BUDGET // max(1, sum(map(len, program.ranks)))
    search = _Moves(program, table, room, Random(seed))
    return search.run(tries, goal * (1 + 1e-9))


def is_short(program: Program) -> bool:
    """Whether there is time for enough moves."""
    return sum(map(len, program.ranks)) * _LEAST_TRIES <= _BUDGET


class _Moves:
    """Lists of numbers: 4 * pair + what is done; pairs are stage * M + microbatch."""

    def __init__(
        self, program: Program, table: CostTable, room: tuple[int, ...], random: Random
    ) -> None:
        self.program = program
        self.room = room
        self.random = random
        count = program.num_microbatches
        stages = program.placement.num_stages
        self.split = [False] * stages * count
        rank_of = program.placement.rank_of
        self.rank = [rank_of(s, m) for s in range(stages) for m in range(count)]
        self.again = [False] * stages * count
        for stage, microbatch in recomputed_pairs(program):
            self.again[stage * count + microbatch] = True
        self.took = [0.0] * (4 * stages * count)
        self.items: dict[int, Instruction] = {}
        self.rows: list[list[int]] = []
        for row in program.ranks:
            self.rows.append([])
            for item in row:
                assert item.microbatch is not None
                pair = item.stage * count + item.microbatch
                self.split[pair] |= item.kind is Kind.I
                number = 4 * pair + _place(item)
                self.items[number] = Instruction(item.kind, item.stage, item.microbatch)
                self.took[number] = table.of(item)
                self.rows[-1].append(number)
        for pair in range(stages * count):
            stage, microbatch = divmod(pair, count)
            self.items[4 * pair + _R] = Instruction(Kind.R, stage, microbatch)
            self.took[4 * pair + _R] = table.recompute[stage]
        # What each needs from other stages, and how long that travels; its own stage's list keeps
        # F, R, B, W in order.
        self.needs: list[tuple[tuple[int, float], ...]] = [()] * len(self.took)
        for boundary, hop in zip(program.boundaries, table.hops, strict=True):
            for microbatch in range(count):
                low = boundary.source * count + microbatch
                high = boundary.target * count + microbatch
                there = hop if self.rank[low] != self.rank[high] else 0.0
                self.needs[4 * high + _F] += ((4 * low + _F, there),)
                self.needs[4 * low + _B] += ((4 * high + _B, there),)
        # Of the order that was taken last; of the one that is tried.
        self.start = self.new_start = [0.0] * len(self.took)
        self.end = self.new_end = [0.0] * len(self.took)
        # The last trial in which an instruction's time was computed, and that trial's number.
        self.made = [0] * len(self.took)
        self.trial = 0

    def run(self, tries: int, goal: float) -> Program:
        found = self.times([0] * len(self.rows), -1.0)
        assert found is not None
        current = best = first = found
        self.take()
        rows = [list(row) for row in self.rows]
        chain = self.chain()
        for turn in range(tries):
            if best[0] <= goal:
                break
            undo = self.move(chain)
            if undo is None:
                continue
            found = self.times_after(undo[0], undo[1])
            heat = _HEAT * self.took[0] * (1 - turn / tries)
            worse = None if found is None else found[1] - current[1]
            if worse is None or (
                worse > 0 and (heat <= 0 or self.random.random() >= exp(-worse / heat))
            ):
                rank, row, pair = undo
                self.rows[rank] = row
                if pair >= 0:
                    self.again[pair] = not self.again[pair]
                continue
            assert found is not None
            current = found
            self.take()
            chain = self.chain()
            if current < best:
                best, rows = current, [list(row) for row in self.rows]
        if best[0] >= first[0] * (1 - 1e-9):
            return self.program
        return self.program.with_ranks(
            tuple(tuple(self.items[number] for number in row) for row in rows)
        )

    def move(self, chain: list[int]) -> tuple[int, list[int], int] | None:
        """Changes one rank's list; how to undo it, None if the rules do not allow it."""
        random = self.random
        node = chain[random.randrange(len(chain))]
        rank = self.rank[node // 4]
        before = self.rows[rank]
        row = list(before)
        place = row.index(node)
        pair, flipped = node // 4, -1
        draw = random.random()
        if draw < 0.2:
            flipped = pair if node % 4 != _W else row[max(0, place - 1)] // 4
            self.again[flipped] = not self.again[flipped]
            if self.again[flipped]:
                row.insert(row.index(4 * flipped + _B), 4 * flipped + _R)
            else:
                row.remove(4 * flipped + _R)
        elif draw < 0.65:
            target = max(0, place - random.randint(1, _FAR))
            row.insert(target, row.pop(place))
        else:
            if not place:
                return None
            target = min(len(row) - 1, place - 1 + random.randint(1, _FAR))
            row.insert(target, row.pop(place - 1))
        if row != before and self.allowed(row, self.room[rank]):
            self.rows[rank] = row
            return rank, before, flipped
        if flipped >= 0:
            self.again[flipped] = not self.again[flipped]
        return None

    def allowed(self, row: list[int], room: int) -> bool:
        """Whether every pair's instructions keep their order, within the room."""
        held = 0
        done: dict[int, int] = {}
        for number in row:
            pair, what = divmod(number, 4)
            last = done.get(pair, -1)
            if what < last or (what and last < 0):
                return False
            if what == _R or (what == _F and not self.again[pair]):
                held += 1
                if held > room:
                    return False
            elif what == (_W if self.split[pair] else _B):
                held -= 1
            done[pair] = what
        return True

    def take(self) -> None:
        """The order that was tried is the one to go on from."""
        self.start, self.end = self.new_start, self.new_end

    def times_after(self, rank: int, before: list[int]) -> tuple[float, float] | None:
        """Like ``times``, of all that can have changed with one rank's list.

        What began before the first changed place of the list is what it was: nothing that changed
        ended before it did.
        """
        row, start = self.rows[rank], self.start
        first = next((i for i, (a, b) in enumerate(zip(row, before, strict=False)) if a != b), 0)
        since = self.end[row[first - 1]] if first else 0.0
        places = [bisect_left(other, since, key=start.__getitem__) for other in self.rows]
        places[rank] = first
        return self.times(places, since)

    def times(self, places: list[int], since: float) -> tuple[float, float] | None:
        """(makespan, makespan and a little of all ranks' ends); None if the lists cannot run.

        ``places`` are where each rank's list begins to be new, and are changed; what began before
        ``since`` is known.
        """
        self.trial += 1
        trial, made, needs, took = self.trial, self.made, self.needs, self.took
        old = self.start
        start, end = old.copy(), self.end.copy()
        clock = []
        for row, index in zip(self.rows, places, strict=True):
            clock.append(end[row[index - 1]] if index else 0.0)
            # What takes no time begins when it ends.
            while index and old[row[index - 1]] >= since:
                index -= 1
                made[row[index]] = trial
        left = sum(map(len, self.rows)) - sum(places)
        waiting: dict[int, list[int]] = {}
        ready = list(range(len(self.rows)))
        while ready:
            rank = ready.pop()
            row, index, now = self.rows[rank], places[rank], clock[rank]
            while index < len(row):
                node = row[index]
                time = now
                for need, hop in needs[node]:
                    if old[need] >= since and made[need] != trial:
                        waiting.setdefault(need, []).append(rank)
                        break
                    if end[need] + hop > time:
                        time = end[need] + hop
                else:
                    start[node] = time
                    now = end[node] = time + took[node]
                    made[node] = trial
                    left -= 1
                    index += 1
                    if node in waiting:
                        ready += waiting.pop(node)
                    continue
                break
            places[rank], clock[rank] = index, now
        if left:
            return None
        self.new_start, self.new_end = start, end
        span = max(clock)
        return span, span + 0.1 * sum(clock) / len(clock)

    def chain(self) -> list[int]:
        """A longest chain: what could not have begun earlier."""
        before: dict[int, int] = {}
        for row in self.rows:
            for first, second in pairwise(row):
                before[second] = first
        node = max((row[-1] for row in self.rows if row), key=lambda n: (self.end[n], n))
        found = [node]
        while True:
            time = self.start[node]
            tight = [n for n, hop in self.needs[node] if self.end[n] + hop >= time - 1e-9]
            if node in before and self.end[before[node]] >= time - 1e-9:
                tight.append(before[node])
            if not tight or time <= 0.0:
                return found
            node = tight[self.random.randrange(len(tight))]
            found.append(node)


def _place(item: Instruction) -> int:
    if item.kind in BACKWARD_KINDS:
        return _B
    return {Kind.F: _F, Kind.R: _R, Kind.W: _W}[item.kind]
