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
ever; what is behind the last call is the epilogue, for any number of calls before it. An update may
take the gradients of several batches; a stream may then begin, or end, in the midst of one.

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
from strategies.ir.kinds import Kind
from strategies.ir.program import Program
from strategies.ir.verify import verify
from strategies.schedules.schedule import Lateness


@dataclass(frozen=True, slots=True)
class Update:
    """What an update of a stage's weights consists of, beside its STEP.

    Attributes:
        buckets: Per stage, reductions of its gradients; 0 for none.
        overlap: Whether they start behind the last gradient, not right before the STEP.
        gathers: Whether replicas update shares of what they reduce, and gather them.
    """

    buckets: tuple[int, ...]
    overlap: bool
    gathers: bool


def add_updates(compute: Program, lateness: Lateness, update: Update, *, per_batch: int) -> Program:
    """A stream of F and B with versions, reductions and optimizer steps; verified.

    Raises:
        ProgramError: The order is not that of 1F1B without a flush.
    """
    program = replace(compute, per_update=lateness.per_update, per_batch=per_batch)
    clock = _Clock(program, lateness)
    for rank, row in enumerate(program.ranks):
        if any(clock.of(first) >= clock.of(second) for first, second in pairwise(row)):
            raise ProgramError(
                f"{compute.schedule}: rank {rank} does not run in the order of 1F1B, F of "
                "microbatch g and then B of microbatch g - (pp - 1 - rank), which is the only one "
                "that is cut into steps without a flush."
            )
    return verify(clock.with_updates(update, closes=True))


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
        program: The stream over some batches, with updates, not lowered.
        lateness: When its updates are made.
        update: What one consists of.
        per_call: Microbatches of a batch, M.
    """

    program: Program
    lateness: Lateness
    update: Update
    per_call: int

    @staticmethod
    def count(lateness: Lateness, update: Update, pp: int, per_call: int) -> int:
        """Batches of a stream that has all calls which differ, and one behind them."""
        cycle = max(_turns(lateness, pp, per_call), lateness.batches(per_call))
        return _steady_from(lateness, update, pp, per_call) + cycle + 1

    @property
    def num_labels(self) -> int:
        return label_period(self.lateness, self.program.placement.num_ranks, self.per_call)

    @property
    def steady_from(self) -> int:
        """The first call that is like all that follow."""
        pp = self.program.placement.num_ranks
        return _steady_from(self.lateness, self.update, pp, self.per_call)

    @property
    def cycle(self) -> int:
        """After how many calls of the steady state their lists repeat."""
        return max(self.num_labels // self.per_call, self.lateness.batches(self.per_call))

    def behind(self, batches: int) -> Calls:
        """The same where the first update has the gradients of so many batches already."""
        return self._behind.setdefault(
            batches,
            replace(self, lateness=replace(self.lateness, begun=batches * self.per_call)),
        )

    @cached_property
    def _behind(self) -> dict[int, Calls]:
        return {self.lateness.begun // self.per_call: self}

    def updates_before(self, number: int) -> int:
        """How many updates have all of their gradients behind so many calls, or had them before."""
        return self.lateness.update_of(number * self.per_call)

    def call(self, number: int) -> Program:
        """What the call runs that lets in batch ``number``, counted from an empty pipeline."""
        return self._cut[self._like(number)]

    def drain(self, number: int, *, closes: bool = True) -> tuple[Program, ...]:
        """What empties the pipeline behind ``number`` calls, in parts with a STEP at the end.

        One that ``closes`` applies the gradients of an update that lacks some of its batches;
        without it they are there behind the last part, which has no STEP then.
        """
        like = self._like(number)
        if (like, closes) not in self._drained:
            rows, times = self._stream(like, closes=closes)
            self._drained[like, closes] = (
                _parts(self._between(rows, times, like, self._bound(like), None)) if like else ()
            )
        return self._drained[like, closes]

    @cached_property
    def _drained(self) -> dict[tuple[int, bool], tuple[Program, ...]]:
        return {}

    def _like(self, number: int) -> int:
        """The first call whose list is the same."""
        first = self.steady_from
        return number if number < first else first + (number - first) % self.cycle

    @cached_property
    def _cut(self) -> list[Program]:
        count = self.steady_from + self.cycle
        # One more, so that no call that is cut out has an end of the stream behind it.
        rows, times = self._stream(count + 1, closes=True)
        return [
            self._between(rows, times, n, self._bound(n), self._bound(n + 1)) for n in range(count)
        ]

    def _bound(self, number: int) -> list[int]:
        """Per rank, the time at which the call begins."""
        clock = _Clock(self.program, self.lateness)
        stages = [
            self.program.placement.stages_of(rank)[0] for rank in range(len(self.program.ranks))
        ]
        return [clock.entrance(stage, number * self.per_call) for stage in stages]

    def _stream(self, batches: int, *, closes: bool) -> tuple[Program, list[list[int]]]:
        """The lowered stream over that many batches, and when each instruction is."""
        count = batches * self.per_call
        assert count <= self.program.num_microbatches
        shorter = replace(
            self.program,
            num_microbatches=count,
            begun=self.lateness.begun,
            ranks=tuple(
                tuple(i for i in row if i.microbatch is not None and i.microbatch < count)
                for row in self.program.ranks
            ),
        )
        clock = _Clock(shorter, self.lateness)
        return _lowered(clock.with_updates(self.update, closes=closes), clock)

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
        if item.microbatch is None:
            assert item.version is not None
            # A reduction that waits for its edge is not begun inside the backward before it, which
            # may be one of the next update.
            return replace(
                item,
                version=item.version - self.updates_before(number),
                after=tuple(self._relabelled(edge) for edge in item.after),
            )
        return self._relabelled(item)

    def _relabelled(self, item: Instruction) -> Instruction:
        assert item.microbatch is not None
        return replace(item, microbatch=item.microbatch % self.num_labels, version=None)


def label_period(lateness: Lateness, pp: int, per_call: int) -> int:
    """Microbatches of a stream behind which their labels begin again."""
    return per_call * _turns(lateness, pp, per_call)


def _turns(lateness: Lateness, pp: int, per_call: int) -> int:
    """Calls behind which a label means another microbatch: the first is done on all ranks.

    So many that updates of several batches go round with them.
    """
    least, batches = 1 + -(-pp // per_call), lateness.batches(per_call)
    if least > batches:
        return -(-least // batches) * batches
    return next(turns for turns in range(least, batches + 1) if batches % turns == 0)


def _steady_from(lateness: Lateness, update: Update, pp: int, per_call: int) -> int:
    late = max(lateness.updates) * lateness.per_update
    # The first call that applies an update has no gather of the one before.
    return -(-max(late, pp - 1) // per_call) + update.gathers


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
    for message in program.transfers:
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


# Places within a tick. No gradient waits for an update, and a microbatch's RECV stands
# behind the update that its forward reads.
_TICK = 8
(
    _RECOMPUTE, _COMPUTE, _GRADIENT_SENT, _REDUCE, _UPDATE, _ENTRANCE, _GATHER, _ACTIVATION_SENT,
) = range(8)  # fmt: skip


class _Clock:
    """When each instruction of a stream is; the same for all calls."""

    def __init__(self, program: Program, lateness: Lateness) -> None:
        self._program = program
        self._lateness = lateness
        self._stages = program.placement.num_stages

    def of(self, item: Instruction) -> int:
        if item.microbatch is None:
            assert item.version is not None
            whole = self._lateness.first_of(item.version) <= self._program.num_microbatches
            if item.kind is Kind.REDUCE and whole and not item.after:
                return _TICK * self._backward(item.stage, self._last(item.version)) + _REDUCE
            # Right before the first forward that reads the version, whether there is one or not;
            # what begins a call stands behind its entrance. Also reductions that are earlier than
            # anybody could know, where some gradients do not come.
            place = {Kind.STEP: _UPDATE, Kind.GATHER: _GATHER}.get(item.kind, _REDUCE)
            reader = self._reader(item.stage, item.version)
            return _TICK * (self._forward(item.stage, reader) - 1) + place
        if item.kind is Kind.F:
            return _TICK * self._forward(item.stage, item.microbatch) + _COMPUTE
        compute = {Kind.B: _COMPUTE, Kind.R: _RECOMPUTE}.get(item.kind)
        if compute is None:
            raise ProgramError(
                f"{self._program.schedule}: {item} in a schedule without a flush, which runs F, B "
                "and R. Try schedule.split_backward=false."
            )
        return _TICK * self._backward(item.stage, item.microbatch) + compute

    def entrance(self, stage: int, microbatch: int) -> int:
        """From when on all is behind the update that a microbatch's forward reads."""
        return _TICK * (self._forward(stage, microbatch) - 1) + _ENTRANCE

    def message(self, payload: Kind, source: int, microbatch: int) -> int:
        if payload is Kind.F:
            return _TICK * self._forward(source, microbatch) + _ACTIVATION_SENT
        return _TICK * self._backward(source, microbatch) + _GRADIENT_SENT

    def with_updates(self, update: Update, *, closes: bool) -> Program:
        """The program's compute with the versions that it reads, and what makes them."""
        rows = []
        for rank, row in enumerate(self._program.ranks):
            items = [self._named(item) for item in row]
            for stage in self._program.placement.stages_of(rank):
                items += self._updates(stage, update, closes=closes)
            rows.append(tuple(sorted(items, key=self.of)))
        return self._program.with_ranks(tuple(rows))

    def _named(self, item: Instruction) -> Instruction:
        """With the version that it reads."""
        assert item.microbatch is not None
        unit = self._lateness.update_of(item.microbatch)
        return replace(item, version=max(unit - self._lateness.updates[item.stage], 0))

    def _updates(self, stage: int, update: Update, *, closes: bool) -> list[Instruction]:
        """The REDUCEs, STEPs and GATHERs of a stage; one that lacks gradients if it ``closes``."""
        count, found = self._program.num_microbatches, []
        whole = self._lateness.update_of(count)
        if closes and count and self._lateness.update_of(count - 1) == whole:
            whole += 1
        for version in range(1, whole + 1):
            edge = Instruction(Kind.B, stage, self._last(version))
            found += [
                Instruction(
                    Kind.REDUCE, stage, bucket=bucket, version=version,
                    after=() if update.overlap else (edge,),
                )
                for bucket in range(update.buckets[stage])
            ]  # fmt: skip
            found.append(Instruction(Kind.STEP, stage, version=version))
            read = self._reader(stage, version) < count
            if update.gathers and update.buckets[stage] and read:
                found.append(Instruction(Kind.GATHER, stage, version=version))
        return found

    def _last(self, version: int) -> int:
        """The last microbatch whose gradient makes a version."""
        whole = self._lateness.first_of(version) - 1
        return min(whole, self._program.num_microbatches - 1)

    def _reader(self, stage: int, version: int) -> int:
        """The first microbatch whose forward reads a version."""
        return self._lateness.first_of(version + self._lateness.updates[stage])

    def _forward(self, stage: int, microbatch: int) -> int:
        return 2 * microbatch + stage

    def _backward(self, stage: int, microbatch: int) -> int:
        return 2 * microbatch + 2 * self._stages - 1 - stage
