"""What every wait of a measured step was for, and what would be faster.

A rank waits before an instruction until the value arrives that it needs. While it waits, the rank
that makes the value computes something, or waits itself, for a third one: so each idle moment is
blamed on the instruction that ran at that moment at the end of this chain. From the end of what
makes a value to the beginning of what uses it, with the rank idle, is communication that shows;
idle with the value there is the rank's own delay (its host launches late, or does something else).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from strategies.analysis.timeline import Event, Timeline
from strategies.costs.table import CostTable
from strategies.costs.uniform import UniformCosts
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import Program
from strategies.lowering.send_recv import add_messages
from strategies.referee.opinion import Ours, alternatives
from strategies.referee.trace.one_clock import Measured
from strategies.simulator.engine import simulate

# A rank, or a stage, that takes that much longer than the others in the middle is slow.
_SLOW = 0.05
# Shorter idle stretches are no waits worth a name.
_SHORT_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that stood idle.

    Attributes:
        rank: Which.
        before: The instruction that it then went on with; None at the end of its list.
        start: When it became idle, in seconds.
        end: When it went on.
        awaited: What made the value that was missing; None for none.
        source: The rank of that.
        blamed: (rank, instruction) -> seconds of it, at the end of the chain.
        message: Seconds from the end of ``awaited`` to the end of the wait.
        own: Seconds in which nothing was missing.
    """

    rank: int
    before: Instruction | None
    start: float
    end: float
    awaited: Instruction | None
    source: int | None
    blamed: tuple[tuple[int, Instruction, float], ...]
    message: float
    own: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What the stages took in a trace, for any order of them.

    Attributes:
        forward: Seconds per stage, the median; likewise the others.
        backward: B, or I and W together.
        backward_input: I; half of B where the trace has B alone.
        message: Seconds of a message that crosses ranks, the median of those that showed.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    message: float

    def table(self, program: Program) -> CostTable:
        uniform = UniformCosts(
            self.forward, self.backward, self.backward_input, p2p=self.message
        ).table(program)
        return replace(uniform, name="traced", time_unit="s")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a trace comes to.

    Attributes:
        measured: The step.
        waits: All of them, the longest first.
        busy: Per rank, seconds of computation.
        blame: (rank, stage, kind) -> seconds for which other ranks waited because of it.
        slow_rank: The rank that takes longest, and by which factor of the others' middle; None
            where none stands out.
        slow_stage: The stage of it that does, likewise; the rank's all alike if it is the machine.
        exposed: Seconds of communication that show, on all ranks together.
        costs: Of the stages, as measured.
        same: The same order with these costs.
        without_slow: The same with the slow rank's stages as fast as the others'; None if none is.
        ours: Orders of ours with these costs, the fastest first.
    """

    measured: Measured
    waits: tuple[Wait, ...]
    busy: tuple[float, ...]
    blame: Mapping[tuple[int, int, Kind], float]
    slow_rank: tuple[int, float] | None
    slow_stage: tuple[int, float] | None
    exposed: float
    costs: MeasuredCosts
    same: Timeline
    without_slow: Timeline | None
    ours: tuple[Ours, ...]


def explain(measured: Measured) -> Explanation:
    """Blames the waits of a measured step, and simulates what would be."""
    timeline = measured.timeline
    program = timeline.program
    waits = tuple(sorted(_waits(timeline), key=lambda wait: -wait.seconds))
    blame: dict[tuple[int, int, Kind], float] = defaultdict(float)
    for wait in waits:
        for rank, item, seconds in wait.blamed:
            blame[rank, item.stage, item.kind] += seconds
    costs = _costs(measured, waits)
    slow = _slow_rank(measured, costs)
    ranks = range(len(program.ranks))
    ours = sorted(alternatives(program, costs), key=lambda entry: entry.makespan)
    return Explanation(
        measured,
        waits,
        tuple(timeline.busy(rank) for rank in ranks),
        dict(sorted(blame.items(), key=lambda entry: -entry[1])),
        slow,
        None if slow is None else _slow_stage(program, costs, slow[0]),
        sum(wait.message for wait in waits),
        costs,
        simulate(add_messages(program), costs),
        None
        if slow is None
        else simulate(add_messages(program), _without(program, costs, slow[0])),
        tuple(ours),
    )


# ------------------------------------------------------------------------------------------- costs


def _costs(measured: Measured, waits: tuple[Wait, ...]) -> MeasuredCosts:
    stages = range(measured.timeline.program.placement.num_stages)
    took = {key: median(row) for key, row in measured.durations.items()}
    shared = _of_pairs(measured)

    def of(kind: Kind, stage: int) -> float:
        return took.get((kind, stage), shared.get((kind, stage), 0.0))

    forward = tuple(max(of(Kind.F, stage), 1e-9) for stage in stages)
    whole, inputs = [], []
    for stage in stages:
        split, both = of(Kind.I, stage) + of(Kind.W, stage), of(Kind.B, stage)
        whole.append(max(both or split, 2e-9))
        share = of(Kind.I, stage) / split if split else 0.5
        inputs.append(min(max(share, 0.01), 0.99) * whole[-1])
    shown = [wait.message for wait in waits if wait.awaited is not None and wait.message > 0]
    return MeasuredCosts(forward, tuple(whole), tuple(inputs), median(shown) if shown else 0.0)


def _of_pairs(measured: Measured) -> dict[tuple[Kind, int], float]:
    """Halves of fused pairs, where a stage has nothing else: a third of the pair, two thirds."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    timeline = measured.timeline
    for rank in range(len(timeline.program.ranks)):
        for event in timeline.events(rank):
            for place, half in enumerate(event.instruction.halves):
                share = (event.end - event.start) * (1 + place) / 3
                found[half.kind, half.stage].append(share)
    return {key: median(row) for key, row in found.items()}


def _per_microbatch(program: Program, costs: MeasuredCosts, rank: int) -> float:
    return sum(costs.forward[s] + costs.backward[s] for s in program.placement.stages_of(rank))


def _slow_rank(measured: Measured, costs: MeasuredCosts) -> tuple[int, float] | None:
    program = measured.timeline.program
    took = [_per_microbatch(program, costs, rank) for rank in range(len(program.ranks))]
    if len(took) < 2:
        return None
    slowest = max(range(len(took)), key=took.__getitem__)
    others = median(took[:slowest] + took[slowest + 1 :])
    factor = took[slowest] / others
    return (slowest, factor) if factor > 1 + _SLOW else None


def _slow_stage(program: Program, costs: MeasuredCosts, rank: int) -> tuple[int, float]:
    """The stage of the slow rank that is furthest above the stages of the others."""
    own = program.placement.stages_of(rank)
    took = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
    others = [took[stage] for stage in range(len(took)) if stage not in own]
    middle = median(others) if others else median(took)
    stage = max(own, key=lambda stage: took[stage])
    return stage, took[stage] / middle


def _without(program: Program, costs: MeasuredCosts, rank: int) -> MeasuredCosts:
    """The costs with one rank's stages as fast as those of the others in the middle."""
    own = set(program.placement.stages_of(rank))

    def middle(row: tuple[float, ...]) -> tuple[float, ...]:
        others = [each for stage, each in enumerate(row) if stage not in own] or list(row)
        usual = median(others)
        return tuple(min(each, usual) if s in own else each for s, each in enumerate(row))

    inputs = tuple(
        whole * part / old
        for whole, part, old in zip(
            middle(costs.backward), costs.backward_input, costs.backward, strict=True
        )
    )
    return MeasuredCosts(middle(costs.forward), middle(costs.backward), inputs, costs.message)


# ------------------------------------------------------------------------------------------- waits


def _waits(timeline: Timeline) -> list[Wait]:
    program = timeline.program
    ranks = range(len(program.ranks))
    events = [sorted(timeline.compute(rank), key=lambda event: event.start) for rank in ranks]
    walk = _Walk(timeline, events)
    first, last = timeline.origin_time, max(event.end for row in events for event in row)
    least = _SHORT_SHARE * timeline.makespan
    found = []
    for rank in ranks:
        before = first
        for event in events[rank]:
            if event.start - before > least:
                found.append(walk.wait(rank, before, event))
            before = max(before, event.end)
        if last - before > least:
            blamed = tuple(walk.running(rank, before, last, set()))
            found.append(Wait(rank, None, before, last, None, None, blamed, 0.0, 0.0))
    return found


class _Walk:
    """Who computed what when, and who made what others waited for."""

    def __init__(self, timeline: Timeline, events: list[list[Event]]) -> None:
        self.program, self.events = timeline.program, events
        self.starts = [[event.start for event in row] for row in events]
        self.made: dict[tuple[bool, int, int], Event] = {}
        for row in events:
            for event in row:
                for part in event.instruction.parts:
                    if part.kind is not Kind.W and part.microbatch is not None:
                        self.made[part.kind is Kind.F, part.stage, part.microbatch] = event
        self.last = max((event for row in events for event in row), key=lambda event: event.end)

    def wait(self, rank: int, start: float, event: Event) -> Wait:
        maker = self.maker(event)
        if maker is None or maker.end <= start:
            # The value was there, or none was needed: the rank's own delay.
            return Wait(rank, event.instruction, start, event.start, None, None, (), 0.0,
                        event.start - start)  # fmt: skip
        until = min(maker.end, event.start)
        blamed = tuple(self.running(maker.rank, start, until, {rank}))
        return Wait(
            rank, event.instruction, start, event.start, maker.instruction, maker.rank, blamed,
            max(0.0, event.start - maker.end), 0.0,
        )  # fmt: skip

    def maker(self, event: Event) -> Event | None:
        """What made the last of the values that an instruction takes from other ranks."""
        found = None
        for part in event.instruction.parts:
            if part.kind is Kind.W or part.microbatch is None:
                continue
            forward = part.kind is Kind.F
            source = part.stage - 1 if forward else part.stage + 1
            made = self.made.get((forward, source, part.microbatch))
            if made is None or made.rank == event.rank:
                continue
            if found is None or made.end > found.end:
                found = made
        return found

    def running(
        self, rank: int, start: float, end: float, seen: set[int]
    ) -> list[tuple[int, Instruction, float]]:
        """Who computed between two moments, followed from a rank to those that it waits for."""
        found: list[tuple[int, Instruction, float]] = []
        row = self.events[rank]
        place = max(0, bisect_left(self.starts[rank], start) - 1)
        at = start
        for event in row[place:]:
            if event.end <= at:
                continue
            if event.start > at:
                found += self.idle(rank, at, min(event.start, end), event, seen)
                at = min(event.start, end)
            if at >= end:
                return found
            stop = min(event.end, end)
            found.append((rank, event.instruction, stop - at))
            at = stop
            if at >= end:
                return found
        if at < end and self.last.rank not in seen | {rank}:
            # The rank is done; what the step waits for goes on at its last instruction.
            found += self.running(self.last.rank, at, end, seen | {rank})
        return found

    def idle(
        self, rank: int, start: float, end: float, event: Event, seen: set[int]
    ) -> list[tuple[int, Instruction, float]]:
        """A stretch in which a rank that was waited for waits itself."""
        maker = self.maker(event)
        if maker is None or maker.end <= start or maker.rank in seen | {rank}:
            return []
        return self.running(maker.rank, start, min(end, maker.end), seen | {rank})
