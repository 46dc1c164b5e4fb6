"""Moves instructions in finished lists, as long as the step gets shorter.

Two searches over one state, ``TimedLists``:

``improve``, for ``recompute=optimal``: an instruction of a longest chain moves a few places to the
front of its list, or the one before it to the back, or a pair begins or ceases to be recomputed.
What is faster stays; at first, what is a little slower, too (simulated annealing).

``prepose_forward``, the fourth pass of Mario (Liu et al., 2025,
https://doi.org/10.1145/3710848.3710878): the same search restricted to forwards. Where a rank waits
for the gradient of a backward, the next forward of its list moves in front of that backward.

No move lets a rank hold more full activations than it may. Both searches are bounded by a count,
not by a clock, and draw the same random numbers every time: every rank comes to the same program.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import inf, log
from random import Random
from typing import NamedTuple

from strategies.costs.table import CostTable
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import Program, recomputed_pairs

# Instructions that are timed in all: about 0.1 s for one start of ``improve``, and a second for
# ``prepose_forward``.
_BUDGET = 400_000
_PREPOSE_BUDGET = 6_000_000
_FAR = 3  # Places that one move crosses at most.
_HEAT = 0.2  # Of a forward: how much slower a move may be at first.
_SAME = 1e-9  # Times that differ by less, in shares of the longest instruction, are equal.


class Cost(NamedTuple):
    """What a search lowers: of equal makespans, the one whose ranks end earlier."""

    makespan: float
    blended: float  # With a tenth of the mean of the ranks' ends.


class Change(NamedTuple):
    """One rank's list before a move, and the pair that began or ceased to be recomputed."""

    rank: int
    row: list[int]
    pair: int = -1


class TimedLists:
    """Lists of numbers of instructions, and when they run; the one mutable thing of a search.

    Attributes:
        rows: Per rank, the numbers in order.
        items: By number: those of the program, then an R for each pair that has none.
        pairs: (stage, microbatch) pairs, as stage * M + microbatch; two of a fused pair.
        forward: Pair -> its F; likewise its R, its B or I, and its W if it has one.
        needs: What an instruction needs from other stages, and how long that travels. Moves keep
            the order of a pair's own instructions.
        start: When each instruction began in the lists that were kept last.
    """

    def __init__(self, program: Program, table: CostTable, room: tuple[int, ...] = ()) -> None:
        self._program = program
        self.room = room
        count = program.num_microbatches
        self.items = [item for row in program.ranks for item in row]
        self.rank = [rank for rank, row in enumerate(program.ranks) for _ in row]
        numbers = iter(range(len(self.items)))
        self.rows = [[next(numbers) for _ in row] for row in program.ranks]
        recomputed = recomputed_pairs(program)
        for stage in range(program.placement.num_stages):
            for microbatch in range(count):
                if (stage, microbatch) not in recomputed:
                    self.items.append(Instruction(Kind.R, stage, microbatch))
                    self.rank.append(program.placement.rank_of(stage, microbatch))
        self.took = [table.of(item) for item in self.items]
        self.pairs = [
            tuple(part.stage * count + (part.microbatch or 0) for part in item.parts)
            for item in self.items
        ]
        self.forward: dict[int, int] = {}
        self.recompute: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        self.weight: dict[int, int] = {}
        of_kind = {Kind.F: self.forward, Kind.R: self.recompute, Kind.W: self.weight}
        for number, item in enumerate(self.items):
            for part, pair in zip(item.parts, self.pairs[number], strict=True):
                of_kind.get(part.kind, self.backward)[pair] = number
        # Full activations: an F takes one, or its R in its stead; the last backward frees it.
        self.takes = [0] * len(self.items)
        self.frees = [0] * len(self.items)
        for pair, number in self.forward.items():
            self.takes[number] = int(divmod(pair, count) not in recomputed)
            self.takes[self.recompute[pair]] = 1
            self.frees[self.weight.get(pair, self.backward[pair])] += 1
        self.needs: list[tuple[tuple[int, float], ...]] = [()] * len(self.items)
        for boundary, hop in zip(program.boundaries, table.hops, strict=True):
            for microbatch in range(count):
                low = boundary.source * count + microbatch
                high = boundary.target * count + microbatch
                for made, read in (
                    (self.forward[low], self.forward[high]),
                    (self.backward[high], self.backward[low]),
                ):
                    there = hop if self.rank[made] != self.rank[read] else 0.0
                    self.needs[read] += ((made, there),)
        self.forwards, self.backwards = set(self.forward.values()), set(self.backward.values())
        self.start = self._new_start = [0.0] * len(self.items)
        self.end = self._new_end = [0.0] * len(self.items)
        self.num_timed = 0  # Instructions whose times have been computed.
        # The last trial in which an instruction's time was computed, and that trial's number.
        self._made = [0] * len(self.items)
        self._trial = 0
        first = self._times([0] * len(self.rows), -1.0, inf)
        assert first is not None
        self.cost = first
        self.keep()

    def program(self, rows: list[list[int]]) -> Program:
        """The program with these lists."""
        return self._program.with_ranks(
            tuple(tuple(self.items[number] for number in row) for row in rows)
        )

    def peak(self, row: list[int]) -> int:
        """Full activations that a list holds at its worst moment."""
        held = most = 0
        for number in row:
            held += self.takes[number]
            if held > most:
                most = held
            held -= self.frees[number]
        return most

    def change(self, rank: int, row: list[int], *, pair: int = -1) -> Change | None:
        """Gives a rank another list, in which ``pair`` is flipped; None if it needs more room.

        A pair that is flipped begins or ceases to be recomputed.
        """
        change = Change(rank, self.rows[rank], pair)
        self.rows[rank] = row
        self._flip(pair)
        if self.peak(row) <= self.room[rank]:
            return change
        self.undo(change)
        return None

    def undo(self, change: Change) -> None:
        """Takes back the last change, which was not kept."""
        self.rows[change.rank] = change.row
        self._flip(change.pair)

    def _flip(self, pair: int) -> None:
        if pair >= 0:
            self.takes[self.forward[pair]] ^= 1

    def retime(self, change: Change, *, limit: float = inf) -> Cost | None:
        """What the lists cost after a change; None if they cannot run, or not within ``limit``.

        What began before the first changed place of the list is what it was: nothing that changed
        ended before it did.
        """
        rank, before, _ = change
        row, start = self.rows[rank], self.start
        first = next((i for i, (a, b) in enumerate(zip(row, before, strict=False)) if a != b), 0)
        since = self.end[row[first - 1]] if first else 0.0
        places = [bisect_left(other, since, key=start.__getitem__) for other in self.rows]
        places[rank] = first
        return self._times(places, since, limit)

    def keep(self) -> tuple[list[float], list[float]]:
        """The lists that were timed last are those to go on from; starts and ends before."""
        before = self.start, self.end
        self.start, self.end = self._new_start, self._new_end
        return before

    def backwards_begin(self) -> float:
        """The sum of all backwards' starts."""
        return sum(self.start[number] for number in self.backwards)

    def _times(self, places: list[int], since: float, limit: float) -> Cost | None:
        """Times from ``places`` of the lists on, which are changed; None if they cannot run.

        What began before ``since`` is known.
        """
        self._trial += 1
        trial, made, needs, took = self._trial, self._made, self.needs, self.took
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
        self.num_timed += left
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
            if now > limit:
                return None
            places[rank], clock[rank] = index, now
        if left:
            return None
        self._new_start, self._new_end = start, end
        span = max(clock, default=0.0)
        return Cost(span, span + 0.1 * sum(clock) / max(1, len(clock)))

    def chain(self, random: Random) -> list[int]:
        """A longest chain, last instruction first: what could not have begun earlier."""
        before = {second: first for row in self.rows for first, second in pairwise(row)}
        node = max((row[-1] for row in self.rows if row), key=lambda n: (self.end[n], n))
        found = [node]
        while True:
            time = self.start[node]
            tight = [n for n, hop in self.needs[node] if self.end[n] + hop >= time - 1e-9]
            if node in before and self.end[before[node]] >= time - 1e-9:
                tight.append(before[node])
            if not tight or time <= 0.0:
                return found
            node = tight[0] if len(tight) == 1 else tight[int(len(tight) * random.random())]
            found.append(node)


def makespan(program: Program, table: CostTable) -> float:
    """When the last rank ends; the program has no messages and no updates."""
    return TimedLists(program, table).cost.makespan


# ------------------------------------------------------------------------------------------- moves


def improve(program: Program, table: CostTable, room: tuple[int, ...], *, goal: float) -> Program:
    """The program, or a faster one that holds no more full activations than there is room for.

    Args:
        program: F, R, and B or I and W of every pair, without edges; it keeps within the room.
        table: What they take.
        room: Per rank, in (stage, microbatch) pairs.
        goal: A makespan that no order undercuts: the search ends there.
    """
    lists = TimedLists(program, table, room)
    first = lists.cost
    _prepose(lists, _BUDGET)
    random, heat = Random(0), _HEAT * max(table.forward)
    current = best = lists.cost
    rows, chain = list(lists.rows), lists.chain(random)
    for _ in range(_BUDGET):
        left = 1.0 - lists.num_timed / _BUDGET
        if left <= 0.0 or best.makespan <= goal * (1 + _SAME):
            break
        change = _draw(lists, chain, random)
        if change is None:
            continue
        limit = current.blended - heat * left * log(1.0 - random.random())
        cost = lists.retime(change, limit=limit)
        if cost is None or cost.blended > limit:
            lists.undo(change)
            continue
        lists.keep()
        current, chain = cost, lists.chain(random)
        if current < best:
            best, rows = current, list(lists.rows)
    return lists.program(rows) if best.makespan < first.makespan * (1 - _SAME) else program


def _draw(lists: TimedLists, chain: list[int], random: Random) -> Change | None:
    """Changes one rank's list; None if the rules do not allow what was drawn."""
    number = chain[int(len(chain) * random.random())]
    rank = lists.rank[number]
    row = lists.rows[rank]
    place = row.index(number)
    draw, far = random.random(), 1 + int(_FAR * random.random())
    if draw < 0.2:
        return _flip(lists, rank, lists.pairs[number][-1])
    low, high = _block(lists, row, place)
    if draw < 0.65:  # It moves to the front.
        begin, end = max(0, low - far), high
        moving, passed = row[low:high], row[begin:low]
        changed = moving + passed
    else:  # What stands before it moves to the back.
        if not low:
            return None
        begin, high = _block(lists, row, low - 1)
        end = high + far
        moving, passed = row[begin:high], row[high:end]
        changed = passed + moving
    pairs = {pair for number in moving for pair in lists.pairs[number]}
    if not passed or not all(pairs.isdisjoint(lists.pairs[number]) for number in passed):
        return None
    return lists.change(rank, row[:begin] + changed + row[end:])


def _block(lists: TimedLists, row: list[int], place: int) -> tuple[int, int]:
    """Begin and end of what moves as one: a backward, and its R right before it."""
    pair = lists.pairs[row[place]][-1]
    both = [lists.recompute[pair], lists.backward[pair]]
    for begin in (place - 1, place):
        if begin >= 0 and row[begin : begin + 2] == both:
            return begin, begin + 2
    return place, place + 1


def _flip(lists: TimedLists, rank: int, pair: int) -> Change | None:
    """An R more, right before its backward, or one less."""
    row = lists.rows[rank].copy()
    if lists.takes[lists.forward[pair]]:
        row.insert(row.index(lists.backward[pair]), lists.recompute[pair])
    else:
        row.remove(lists.recompute[pair])
    return lists.change(rank, row, pair=pair)


# ---------------------------------------------------------------------------------------- forwards


def prepose_forward(program: Program, table: CostTable) -> Program:
    """Moves forwards into waits for gradients, as long as that helps; no rank's peak rises."""
    lists = TimedLists(program, table)
    lists.room = tuple(map(lists.peak, lists.rows))
    _prepose(lists, _PREPOSE_BUDGET)
    return lists.program(lists.rows)


def _prepose(lists: TimedLists, budget: int) -> None:
    """Tries every wait, the earliest first, until no forward moves any more."""
    tolerance = _SAME * max(lists.took, default=0.0)
    moved = True
    while moved:
        moved = False
        waits = [
            (lists.start[number], number, rank)
            for rank, row in enumerate(lists.rows)
            for number in row
            if number in lists.backwards
        ]
        for _, number, rank in sorted(waits):
            while lists.num_timed < budget and _prepose_next(lists, rank, number, tolerance):
                moved = True


def _prepose_next(lists: TimedLists, rank: int, number: int, tolerance: float) -> bool:
    """Moves the next forward in front of a backward that waits; whether that helped.

    It helps if the makespan falls, or stays equal and backwards begin earlier.
    """
    row = lists.rows[rank]
    place = row.index(number)
    free = lists.end[row[place - 1]] if place else 0.0
    if lists.start[number] <= free + tolerance:
        return False
    old = next((p for p in range(place + 1, len(row)) if row[p] in lists.forwards), -1)
    if old < 0 or lists.items[row[old]].halves:
        return False
    # What is there before the wait ends cannot depend on the backward that waits.
    ready = max((lists.end[need] + hop for need, hop in lists.needs[row[old]]), default=0.0)
    if ready >= lists.start[number] - tolerance:
        return False
    change = lists.change(rank, [*row[:place], row[old], *row[place:old], *row[old + 1 :]])
    if change is None:
        return False
    limit = lists.cost.makespan + tolerance
    begun = lists.backwards_begin()
    cost = lists.retime(change, limit=limit)
    if cost is not None and cost.makespan <= limit:
        before = lists.keep()
        if cost.makespan < limit - 2 * tolerance or lists.backwards_begin() < begun - tolerance:
            lists.cost = cost
            return True
        lists.start, lists.end = before
    lists.undo(change)
    return False
