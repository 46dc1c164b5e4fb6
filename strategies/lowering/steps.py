"""Cuts a stream, a program of several batches without a flush, into the steps of a training loop.

A synchronous program begins and ends with an empty pipeline. Here the next batch enters while the
one before is still on its way back, so no step stands by itself: there is one program over a number
of batches, from an empty pipeline to an empty one, a prologue, the body as often as batches enter
in steady state, and the epilogue that drains it. As one program it is verified, lowered, simulated
and drawn.

What is executed is the same lists, cut where batch n enters a rank: there step n of the training
loop begins. From the first step of the steady state on they repeat, so a body serves for ever; what
is behind the last step is the epilogue, for any number of steps before it. An update may take the
gradients of several batches; a stream may then begin, or end, in the midst of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise, zip_longest

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import Program, Updates


@dataclass(frozen=True)
class StreamSteps:
    """What each step of a training loop runs of a stream.

    Labels of microbatches go round, so that lists repeat: microbatch g of the stream is called
    g mod ``microbatch_slots``, which is long enough for two that are under way to differ. Versions
    count from the step's first microbatch on: that of an update whose gradients begin j
    microbatches before it is 1 - j / size.

    Attributes:
        program: The stream, lowered, over all batches whose steps differ, and one behind them.
        first_steady: The first step that is like all that follow.
        over: Makes the same over that many microbatches, of which the first update has so many
            others already.
    """

    program: Program
    first_steady: int
    over: Callable[[int, int], Program]

    @property
    def updates(self) -> Updates:
        assert self.program.updates is not None
        return self.program.updates

    @property
    def microbatch_slots(self) -> int:
        return slots_per_cycle(self.updates)

    @property
    def cycle(self) -> int:
        """After how many steps of the steady state their lists repeat."""
        return _cycle(self.updates)

    def resuming(self, batches: int) -> StreamSteps:
        """The same where the first update has the gradients of so many batches already."""
        if batches not in self._resuming:
            begun = batches * self.updates.per_step
            program = self.over(self.program.num_microbatches, begun)
            self._resuming[batches] = replace(self, program=program)
        return self._resuming[batches]

    @cached_property
    def _resuming(self) -> dict[int, StreamSteps]:
        return {self.updates.begun // self.updates.per_step: self}

    def updates_before(self, number: int) -> int:
        """How many updates have all of their gradients behind so many steps, or had them before."""
        return self.updates.of(number * self.updates.per_step)

    def step(self, number: int) -> Program:
        """What the step runs that lets in batch ``number``, counted from an empty pipeline."""
        return self._steps[self._like(number)]

    def drain(self, number: int, *, closes: bool = True) -> tuple[Program, ...]:
        """What empties the pipeline behind ``number`` steps, in parts with a STEP at the end.

        One that ``closes`` applies the gradients of an update that lacks some of its batches;
        without it they are there behind the last part, which has no STEP then.
        """
        like = self._like(number)
        if (like, closes) not in self._drained:
            self._drained[like, closes] = self._rest(like, closes=closes) if like else ()
        return self._drained[like, closes]

    @cached_property
    def _drained(self) -> dict[tuple[int, bool], tuple[Program, ...]]:
        return {}

    def _like(self, number: int) -> int:
        """The first step whose list is the same."""
        first = self.first_steady
        return number if number < first else first + (number - first) % self.cycle

    @cached_property
    def _steps(self) -> list[Program]:
        rows = list(zip(self.program.ranks, self._starts, strict=True))
        return [
            self._labelled([row[starts[n] : starts[n + 1]] for row, starts in rows], n)
            for n in range(self.first_steady + self.cycle)
        ]

    def _rest(self, number: int, *, closes: bool) -> tuple[Program, ...]:
        """Of a stream of so many batches what is behind their steps."""
        program = self.over(number * self.updates.per_step, self.updates.begun)
        complete = self.updates_before(number)
        rows = [
            [item for item in row[starts[number] :] if closes or (item.version or 0) <= complete]
            for row, starts in zip(program.ranks, self._starts, strict=True)
        ]
        return _parts(self._labelled(rows, number))

    @cached_property
    def _starts(self) -> list[list[int]]:
        """Per rank the places at which batches enter, before what their first forward waits for."""
        return [
            [
                _before_arrivals(row, place)
                for place, item in enumerate(row)
                if item.kind is Kind.F and (item.microbatch or 0) % self.updates.per_step == 0
            ]
            for row in self.program.ranks
        ]

    def _labelled(self, rows: Sequence[Sequence[Instruction]], number: int) -> Program:
        before = self.updates_before(number)

        def labelled(item: Instruction) -> Instruction:
            # A reduction that waits for its edge is not begun inside the backward before it, which
            # may be one of the next update.
            after = tuple(map(labelled, item.after))
            if item.microbatch is not None:
                label = item.microbatch % self.microbatch_slots
                return replace(item, microbatch=label, version=None, after=after)
            assert item.version is not None
            return replace(item, version=item.version - before, after=after)

        ranks = tuple(tuple(map(labelled, row)) for row in rows)
        return replace(self.program, ranks=ranks, num_microbatches=self.microbatch_slots)


def num_batches(updates: Updates, *, gathers: bool) -> int:
    """Batches of a stream that has all steps which differ, and one behind them."""
    return first_steady(updates, gathers=gathers) + _cycle(updates) + 1


def first_steady(updates: Updates, *, gathers: bool) -> int:
    """The first step that is like all that follow."""
    late, pp = max(updates.delay) * updates.size, len(updates.delay)
    # The first step that applies an update has no gather of the one before.
    return -(-max(late, pp - 1) // updates.per_step) + gathers


def slots_per_cycle(updates: Updates) -> int:
    """Microbatches of a stream behind which their labels begin again.

    The first is done on all ranks by then, and updates of several batches go round with them.
    """
    least, batches = 1 + -(-len(updates.delay) // updates.per_step), updates.steps
    turns = (each for each in count(least) if each % batches == 0 or batches % each == 0)
    return updates.per_step * next(turns)


def _cycle(updates: Updates) -> int:
    return max(slots_per_cycle(updates) // updates.per_step, updates.steps)


def _before_arrivals(row: Sequence[Instruction], place: int) -> int:
    while place and (row[place - 1].kind, row[place - 1].payload) in _ARRIVALS:
        place -= 1
    return place


_ARRIVALS = {(Kind.GATHER, None), (Kind.RECV, Kind.F)}


def _parts(program: Program) -> tuple[Program, ...]:
    """Each rank's list, cut behind its STEPs; as many parts as the rank with most of them has."""
    cut: list[list[tuple[Instruction, ...]]] = []
    for row in program.ranks:
        ends = [place + 1 for place, item in enumerate(row) if item.kind is Kind.STEP]
        if row[ends[-1] if ends else 0 :]:
            ends.append(len(row))
        cut.append([row[start:end] for start, end in pairwise([0, *ends])])
    return tuple(map(program.with_ranks, zip_longest(*cut, fillvalue=())))
