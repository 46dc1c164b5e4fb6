"""Training without a flush: steps that run into each other, as one program and cut into calls.

A synchronous program begins and ends with an empty pipeline. Here the next batch enters while the
one before is still on its way back, so there is no iteration by itself: there is a stream of
microbatches, in which rank r runs B of microbatch g - (P-1-r) behind F of microbatch g, and an
update of the weights wherever its schedule has one. A program of this kind is that stream over a
number of batches, from an empty pipeline to an empty one: a prologue, the body as often as batches
enter in steady state, and the epilogue that drains it. As one program it is verified, lowered,
simulated and drawn.

What is executed is the same lists, cut (``Calls``): where batch n enters a rank, call n of the
training loop begins. From the first call of the steady state on they repeat, so a body serves for
ever; what is behind the last call is the epilogue, for any number of calls before it.

All is put in one order by a clock that ticks once per instruction: F of microbatch g on stage s at
2g + s, its B at 2g + 2P - 1 - s. That is 1F1B without a flush, and moves with g, so the lists of
all calls fit together. A message goes right behind what makes it; an update stands as late as the
weights that it makes allow, right before the first forward that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import UPDATE_KINDS, Kind
from strategies.ir.program import Program
from strategies.ir.verify import verify
from strategies.lowering.send_recv import messages
from strategies.schedules.schedule import Lateness


def add_updates(
    compute: Program,
    lateness: Lateness,
    buckets: tuple[int, ...],
    *,
    per_batch: int,
    overlap: bool,
) -> Program:
    """A stream of F and B with versions, reductions and optimizer steps; verified.

    A reduction stands behind its update's last gradient; without ``overlap`` before its STEP.

    Raises:
        ProgramError: The order is not that of 1F1B without a flush.
    """
    program = replace(compute, per_update=lateness.per_update, per_batch=per_batch)
    clock = _Clock(program, lateness)
    rows = []
    for rank, row in enumerate(program.ranks):
        events = [(clock.of(item), clock.named(item)) for item in row]
        if any(first >= second for (first, _), (second, _) in pairwise(events)):
            raise ProgramError(
                f"{compute.schedule}: rank {rank} does not run in the order of 1F1B, F of "
                "microbatch g and then B of microbatch g - (pp - 1 - rank), which is the only one "
                "that is cut into steps without a flush."
            )
        for stage in program.placement.stages_of(rank):
            events += clock.updates(stage, buckets[stage], overlap=overlap)
        rows.append(tuple(item for _, item in sorted(events, key=lambda event: event[0])))
    return verify(program.with_ranks(tuple(rows)))


def lower_stream(program: Program, lateness: Lateness) -> Program:
    """With messages, verified; instructions keep their order on each rank."""
    return verify(_lowered(program, _Clock(program, lateness))[0])


@dataclass(frozen=True)
class Calls:
    """The stream, cut into what each call of a training loop runs.

    Labels of microbatches go round, so that lists repeat: microbatch g of the stream is called
    g mod ``num_labels``, which is long enough for two that are under way to differ. Versions count
    from the call's first microbatch on: that of an update whose gradients begin j microbatches
    before it is 1 - j / per_update.

    Attributes:
        program: The stream over ``num_batches`` batches, with updates, not lowered.
        lateness: When its updates are made.
        per_call: Microbatches of a batch, M.
    """

    program: Program
    lateness: Lateness
    per_call: int

    @staticmethod
    def count(lateness: Lateness, pp: int, per_call: int) -> int:
        """Batches of a stream that has all calls which differ, and one behind them."""
        return _steady_from(lateness, pp, per_call) + _turns(pp, per_call) + 1

    @property
    def num_labels(self) -> int:
        return self.per_call * self._turns

    @property
    def _turns(self) -> int:
        return _turns(self.program.placement.num_ranks, self.per_call)

    @property
    def steady_from(self) -> int:
        """The first call that is like all that follow."""
        return _steady_from(self.lateness, self.program.placement.num_ranks, self.per_call)

    def call(self, number: int) -> Program:
        """What the call runs that lets in batch ``number``, counted from an empty pipeline."""
        return self._cut[self._like(number)][0]

    def drain(self, number: int) -> tuple[Program, ...]:
        """What empties the pipeline behind ``number`` calls, in parts with a STEP at the end."""
        return self._drained[self._like(number)]

    def _like(self, number: int) -> int:
        """The first call whose list is the same."""
        first = self.steady_from
        return number if number < first else first + (number - first) % self._turns

    @cached_property
    def _cut(self) -> list[tuple[Program, ...]]:
        first = self.steady_from
        # One more, so that no call that is cut out has an end of the stream behind it.
        rows, times = self._stream(first + self._turns + 1)
        return [
            (self._between(rows, times, n, self._bound(n), self._bound(n + 1)),)
            for n in range(first + self._turns)
        ]

    @cached_property
    def _drained(self) -> list[tuple[Program, ...]]:
        found: list[tuple[Program, ...]] = [()]
        for number in range(1, self.steady_from + self._turns + 1):
            rows, times = self._stream(number)
            whole = self._between(rows, times, number, self._bound(number), None)
            found.append(_parts(whole))
        # Behind the same calls of the steady state, counted from where the labels begin again.
        return found

    def _bound(self, number: int) -> list[int]:
        """Per rank, the time at which the call begins."""
        clock = _Clock(self.program, self.lateness)
        stages = [
            self.program.placement.stages_of(rank)[0] for rank in range(len(self.program.ranks))
        ]
        return [clock.entrance(stage, number * self.per_call) for stage in stages]

    def _stream(self, batches: int) -> tuple[Program, list[list[int]]]:
        """The lowered stream over that many batches, and when each instruction is."""
        count = batches * self.per_call
        shorter = replace(
            self.program,
            num_microbatches=count,
            ranks=tuple(
                tuple(item for item in row if self._within(item, count))
                for row in self.program.ranks
            ),
        )
        assert count <= self.program.num_microbatches
        return _lowered(shorter, _Clock(shorter, self.lateness))

    def _within(self, item: Instruction, count: int) -> bool:
        if item.microbatch is not None:
            return item.microbatch < count
        assert item.version is not None
        return item.version * self.lateness.per_update <= count

    def _between(
        self,
        whole: Program,
        times: list[list[int]],
        number: int,
        low: list[int],
        high: list[int] | None,
    ) -> Program:
        rows = tuple(
            tuple(
                self._labelled(item, number)
                for item, time in zip(row, times[rank], strict=True)
                if low[rank] <= time and (high is None or time < high[rank])
            )
            for rank, row in enumerate(whole.ranks)
        )
        return replace(whole, ranks=rows, num_microbatches=self.num_labels)

    def _labelled(self, item: Instruction, number: int) -> Instruction:
        shift = number * self.per_call // self.lateness.per_update
        if item.kind in UPDATE_KINDS:
            assert item.version is not None
            return replace(item, version=item.version - shift, after=())
        assert item.microbatch is not None
        return replace(item, microbatch=item.microbatch % self.num_labels, version=None)


def _turns(pp: int, per_call: int) -> int:
    """Calls behind which a label means another microbatch: the first is done on all ranks."""
    return 1 + -(-pp // per_call)


def _steady_from(lateness: Lateness, pp: int, per_call: int) -> int:
    late = max(lateness.updates) * lateness.per_update
    return -(-max(late, pp - 1) // per_call)


def _parts(program: Program) -> tuple[Program, ...]:
    """Each rank's list, cut behind its STEPs; as many parts as the rank with most of them has."""
    cut: list[list[tuple[Instruction, ...]]] = []
    for row in program.ranks:
        parts: list[tuple[Instruction, ...]] = []
        start = 0
        for place, item in enumerate(row):
            if item.kind is Kind.STEP:
                parts.append(row[start : place + 1])
                start = place + 1
        if start < len(row):
            parts.append(row[start:])
        cut.append(parts)
    count = max(map(len, cut))
    return tuple(
        program.with_ranks(tuple(parts[n] if n < len(parts) else () for parts in cut))
        for n in range(count)
    )


def _lowered(program: Program, clock: _Clock) -> tuple[Program, list[list[int]]]:
    placement = program.placement
    events: list[list[tuple[tuple[int, int, int], Instruction]]] = [[] for _ in program.ranks]
    for node, item in enumerate(program.graph.nodes):
        rank = program.graph.rank[node]
        events[rank].append(((clock.of(item), node, 0), item))
    for message in messages(program):
        payload, source, target, microbatch = message[:4]
        time = clock.message(payload, source, microbatch)
        send = Instruction(Kind.SEND, source, microbatch, payload=payload, peer=target)
        receive = Instruction(Kind.RECV, target, microbatch, payload=payload, peer=source)
        key = (time, source, target)
        events[placement.rank_of(source, microbatch)].append((key, send))
        events[placement.rank_of(target, microbatch)].append((key, receive))
    ordered = [sorted(row, key=lambda event: event[0]) for row in events]
    rows = tuple(tuple(item for _, item in row) for row in ordered)
    lowered = replace(program, ranks=rows, lowered=True)
    return lowered, [[key[0] for key, _ in row] for row in ordered]


# Places within a tick. Nobody waits with a gradient for an update, and a microbatch's RECV stands
# behind the update that its forward reads.
_TICK = 8
_RECOMPUTE, _COMPUTE, _GRADIENT_SENT, _REDUCE, _UPDATE, _ENTRANCE, _ACTIVATION_SENT = range(7)


class _Clock:
    """When each instruction of a stream is; the same for all calls."""

    def __init__(self, program: Program, lateness: Lateness) -> None:
        self._program = program
        self._lateness = lateness
        self._stages = program.placement.num_stages

    def of(self, item: Instruction) -> int:
        if item.kind in UPDATE_KINDS:
            assert item.version is not None
            last = item.version * self._lateness.per_update - 1
            if item.kind is Kind.REDUCE and not item.after:
                return _TICK * self._backward(item.stage, last) + _REDUCE
            # Right before the first forward that reads the version, whether there is one or not.
            reader = last + 1 + self._lateness.updates[item.stage] * self._lateness.per_update
            behind = _UPDATE if item.kind is Kind.STEP else _REDUCE
            return _TICK * (self._forward(item.stage, reader) - 1) + behind
        assert item.microbatch is not None
        if item.kind is Kind.F:
            return _TICK * self._forward(item.stage, item.microbatch) + _COMPUTE
        place = {Kind.B: _COMPUTE, Kind.R: _RECOMPUTE}.get(item.kind)
        if place is None:
            raise ProgramError(
                f"{self._program.schedule}: {item} in a schedule without a flush, which runs F, B "
                "and R. Try schedule.split_backward=false."
            )
        return _TICK * self._backward(item.stage, item.microbatch) + place

    def entrance(self, stage: int, microbatch: int) -> int:
        """From when on all is behind the update that a microbatch's forward reads."""
        return _TICK * (self._forward(stage, microbatch) - 1) + _ENTRANCE

    def message(self, payload: Kind, source: int, microbatch: int) -> int:
        if payload is Kind.F:
            return _TICK * self._forward(source, microbatch) + _ACTIVATION_SENT
        return _TICK * self._backward(source, microbatch) + _GRADIENT_SENT

    def named(self, item: Instruction) -> Instruction:
        """With the version that it reads."""
        assert item.microbatch is not None
        unit = item.microbatch // self._lateness.per_update
        return replace(item, version=max(unit - self._lateness.updates[item.stage], 0))

    def updates(self, stage: int, buckets: int, *, overlap: bool) -> list[tuple[int, Instruction]]:
        """The REDUCEs and STEPs of a stage, with their times."""
        found = []
        for update in range(self._program.num_microbatches // self._lateness.per_update):
            step = Instruction(Kind.STEP, stage, version=update + 1)
            last = (update + 1) * self._lateness.per_update - 1
            edge = () if overlap else (Instruction(Kind.B, stage, last),)
            reductions = [
                Instruction(Kind.REDUCE, stage, bucket=bucket, after=edge, version=update + 1)
                for bucket in range(buckets)
            ]
            found += [(self.of(item), item) for item in (*reductions, step)]
        return found

    def _forward(self, stage: int, microbatch: int) -> int:
        return 2 * microbatch + stage

    def _backward(self, stage: int, microbatch: int) -> int:
        return 2 * microbatch + 2 * self._stages - 1 - stage
