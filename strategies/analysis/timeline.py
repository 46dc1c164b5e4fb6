"""When each instruction of a program ran, simulated or measured: one type for both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from strategies.ir.instruction import Instruction, exchanges
from strategies.ir.kinds import COMPUTE_KINDS, MESSAGE_KINDS, MICROBATCH_KINDS, Kind
from strategies.ir.program import Program


def inside(program: Program, rank: int) -> tuple[Instruction, ...]:
    """The exchanges of tokens inside of a rank's computations, in their order."""
    row = program.ranks[rank] if program.exchanges else ()
    return tuple(each for item in row for each in exchanges(item, program.exchanges))


class Event(NamedTuple):
    """One instruction with its time span, in the timeline's unit."""

    rank: int
    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of every instruction.

    Attributes:
        program: What ran; ``start[r][i]`` belongs to ``program.ranks[r][i]``, and behind these come
            those of ``inside(program, r)``.
        start: When it began, in ``time_unit``, 0 at the first instruction of all ranks. A SEND
            begins when its value is there, a REDUCE when its channel takes it up.
        end: When it ended; a SEND and a RECV when the message has arrived.
        time_unit: ``F`` (a rank's forward of one microbatch) or ``s``.
        origin: ``simulated`` or ``measured``.
        stage_input: Per stage, the share of a full activation that a forward keeps which is
            recomputed; () for nothing.
    """

    program: Program
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    time_unit: str
    origin: Literal["simulated", "measured"]
    stage_input: tuple[float, ...] = ()

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks: a step with a barrier at its end.

        Of a program without a flush, all of its batches and the time to fill and to drain.
        """
        return max(max(row, default=0.0) for row in self.end) - self.origin_time

    @property
    def origin_time(self) -> float:
        """The first start over all ranks."""
        return min(min(row, default=0.0) for row in self.start)

    @property
    def period(self) -> float:
        """Max over ranks of (end - start): a step without a barrier.

        Messages do not count: one that is on its way to a rank does not keep it from the last step.
        Of a program without a flush: from one batch to the next, in steady state.
        """
        return max(map(self._span, range(len(self.program.ranks))), default=0.0)

    @property
    def step(self) -> float:
        """From one batch to the next: the makespan, or without a flush the period."""
        return self.makespan if self.program.updates is None else self.period

    def _span(self, rank: int) -> float:
        """Of one step; without a flush between the entrances of the last batches.

        Behind these the pipeline drains. Where several make an update, the mean of as many.
        """
        updates, count = self.program.updates, self.program.num_microbatches
        if updates is not None:
            starts = {
                event.instruction.microbatch: event.start
                for event in self.events(rank)
                if event.instruction.kind is Kind.F
            }
            last = count - updates.per_step
            return (starts[last] - starts[last - updates.steps * updates.per_step]) / updates.steps
        own = [e for e in self.events(rank) if e.instruction.kind not in MESSAGE_KINDS]
        return max((e.end for e in own), default=0.0) - min((e.start for e in own), default=0.0)

    def events(self, rank: int) -> Iterator[Event]:
        row = self.program.ranks[rank]
        for item, start, end in zip(row, self.start[rank], self.end[rank], strict=False):
            yield Event(rank, item, start, end)

    def exchanges(self, rank: int) -> Iterator[Event]:
        """When tokens of experts travelled inside of the rank's computations."""
        place = len(self.program.ranks[rank])
        times = zip(self.start[rank][place:], self.end[rank][place:], strict=True)
        for item, span in zip(inside(self.program, rank), times, strict=False):
            yield Event(rank, item, *span)

    def compute(self, rank: int) -> Iterator[Event]:
        """The events that occupy the rank: F B I W R and STEP."""
        return (event for event in self.events(rank) if event.instruction.kind in COMPUTE_KINDS)

    def busy(self, rank: int) -> float:
        """Time in which the rank computes microbatches (F B I W R)."""
        return sum(
            event.end - event.start
            for event in self.events(rank)
            if event.instruction.kind in MICROBATCH_KINDS
        )

    @property
    def bubble_ratio(self) -> float:
        """Idle time over P * step; without a flush in steady state."""
        ranks = range(len(self.program.ranks))
        whole = len(ranks) * (self.step * self.program.steps)
        return 1.0 - sum(map(self.busy, ranks)) / whole if whole else 0.0

    @property
    def exposed_grad_reduce(self) -> float:
        """How long the last reduction outlasts the last compute of all ranks; 0 when hidden.

        Without a flush, the most that a rank waits for reductions before an update.
        """
        if self.program.updates is not None:
            return max(map(self._waits_for_reduction, range(len(self.program.ranks))), default=0.0)
        events = [event for rank in range(len(self.program.ranks)) for event in self.events(rank)]
        reduced = [e.end for e in events if e.instruction.kind is Kind.REDUCE]
        computed = [e.end for e in events if e.instruction.kind in MICROBATCH_KINDS]
        if not reduced or not computed:
            return 0.0
        return max(0.0, max(reduced) - max(computed))

    def _waits_for_reduction(self, rank: int) -> float:
        """The longest that a STEP waits for its REDUCEs behind the last compute, before the drain.

        Measured, it may wait for more: for the verdict on its update, or for hooks.
        """
        events = list(self.events(rank))
        while events and events[-1].instruction.kind is not Kind.F:
            events.pop()
        free, longest = 0.0, 0.0
        reduced: dict[tuple[int, int | None], float] = {}
        for event in events:
            item = event.instruction
            if item.kind is Kind.REDUCE:
                key = item.stage, item.version
                reduced[key] = max(reduced.get(key, 0.0), event.end)
            if item.kind is Kind.STEP:
                complete = reduced.get((item.stage, item.version), 0.0)
                longest = max(longest, min(event.start, complete) - free)
            if item.kind in COMPUTE_KINDS:
                free = max(free, event.end)
        return longest
