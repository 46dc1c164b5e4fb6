"""Walks one rank's list: the only loop that runs a program, and it has no order of its own.

Receives are posted ahead of their place where messages have tags (never where they are matched by
order), values are waited for by the instruction that uses them, and sends are never waited for
inline: a sent buffer is let go when a later receive proves that it has arrived
(``lowering.send_recv``), or with the next step.

The list ends here at its first STEP: Lightning's hooks carry those out, behind ``update.flush``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from strategies.analysis.late_verdict import receives_to_discard, speculation_limits
from strategies.heartbeat import PHASE, STATE, WAITING, Phase
from strategies.ir.instruction import Instruction, exchanges
from strategies.ir.kinds import (
    BACKWARD_KINDS,
    CHANNEL_KINDS,
    GRADIENT_KINDS,
    KINDS,
    MICROBATCH_KINDS,
    Kind,
)
from strategies.ir.program import Program
from strategies.lowering.send_recv import release_points
from strategies.models.nested import tensors as tensors_in
from strategies.runtime.step.boundary_values import BoundaryValues
from strategies.runtime.step.microbatch import Microbatch
from strategies.runtime.step.rank_parts import RankParts
from strategies.runtime.step.stage_compute import PassOptions, StageCompute, StepResult, UnderWay
from strategies.runtime.step.stream_state import Stream

_RECEIVE_AHEAD = 4


class Executor:
    """Runs programs for one rank."""

    def __init__(self, rank: int, parts: RankParts) -> None:
        self._rank = rank
        self._parts = parts
        self._routes: dict[int, tuple[Program, _Route]] = {}
        self._places: dict[tuple[int, int | None], int] = {}

    def run(
        self,
        program: Program,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        *,
        step: int,
        forwards_done: Callable[[StepResult], None],
        recording: Any = None,
        stream: Stream | None = None,
        verdict: Callable[[], None] | None = None,
    ) -> StepResult:
        """Executes a lowered list up to its optimizer steps; says when its forwards are done.

        In a ``stream`` it goes on where the last one of the stream has ended, and the microbatches
        are those that enter with this one. ``recording`` is that of the first one, if there is one.

        ``verdict`` is asked at the program's cut (``analysis/late_verdict.py``) whether the weights
        that the forwards before it have used are confirmed; it raises where they are not, and
        ``abandon`` clears up what has been run.
        """
        parts = self._parts
        mailbox = parts.mailbox
        route = self._route_of(program)
        if stream is None:
            values, under_way = (
                BoundaryValues(program, mailbox, parts.pulse),
                UnderWay(),
            )
            numbered = dict(enumerate(microbatches))
        else:
            values, under_way = stream.values(program, parts), stream.under_way
            numbered = dict(zip(stream.labels(), microbatches, strict=False))
        compute = StageCompute(
            parts,
            values,
            program,
            numbered,
            options,
            route.recomputed if stream is None else stream.recomputed,
            under_way,
            one_loss=route.one_loss,
            num_forwards=route.num_forwards,
            recording=recording,
        )
        record = parts.recorder.begin(step, program, None if stream is None else stream.place)
        self._places = route.channel
        stamp = parts.recorder.stamp
        start, end = record.start, record.end
        if microbatches:
            step_of = options.step_of(microbatches[0].data)
            mailbox.begin(program, step_of, {n: m.signature for n, m in numbered.items()})
        else:
            mailbox.go_on(program)
        if parts.activations is not None:
            parts.activations.begin(len(route.row), tensors_in([m.data for m in microbatches]))
        posted = 0
        passed = 0
        parts.pulse.begin(program)
        beat = parts.pulse.words
        blocks = mailbox.ordered  # Then messages are waited for at their place.
        copies = mailbox.copies
        cut = -1 if verdict is None else route.cut
        for place, (item, kind, halves, final) in enumerate(route.items):
            if place == cut and verdict is not None:
                verdict()
            if kind is Kind.STEP:
                break  # Lightning's optimizer_step carries them out.
            beat[STATE] = place << 1
            if halves and not blocks:
                # The next few receives of the list, whatever compute stands between. Not before a
                # SEND, which somebody may be waiting for.
                while posted < len(route.receives) and posted < passed + _RECEIVE_AHEAD:
                    ahead = route.receives[posted]
                    mailbox.post(route.row[ahead])
                    start[ahead] = stamp()
                    posted += 1
            if stream is not None:
                stream.turn_to(item)
            if halves:
                # A fused pair waits for the inputs of both halves.
                inputs = [values.collect(part, record, stamp) for part in halves]
                beat[STATE] = place << 1  # Waiting for a message had its place there.
                for part in halves:
                    if part.kind is Kind.F:
                        parts.mains.wait(part.stage)
                start[place] = stamp()
                if parts.expert_ranks is not None:
                    self._watch_exchanges(item, route.exchanges.get(place, ()))
                if item.halves and parts.turns is not None:
                    compute.run_pair(item, inputs, final=(final[0], final[1]), turns=parts.turns)
                else:
                    for part, last in zip(halves, final, strict=True):
                        compute.run(part, inputs.pop(0), final=last)
                end[place] = stamp()
                if place == route.last_forward:
                    forwards_done(compute.result)
                if stream is not None:
                    stream.behind(item)
            elif kind is Kind.LOSS:
                start[place] = stamp()
                compute.loss(item)
                end[place] = stamp()
                forwards_done(compute.result)
            elif kind is Kind.SEND:
                if blocks:
                    beat[STATE] = place << 1 | WAITING
                start[place] = stamp()
                awaited = route.awaited.get(place) if copies else None
                values.send(item, busy=awaited is not None and mailbox.are_here(awaited))
                end[place] = stamp()
            elif kind is Kind.RECV:
                passed += 1
                if blocks:
                    beat[STATE] = place << 1 | WAITING
                if blocks or posted < passed:
                    # At its place at the latest: what is released counts on that.
                    mailbox.post(item)
                    start[place] = stamp()
                    posted = passed
                values.passed(item, place, route.release.get(place, ()))
            elif kind is Kind.REDUCE:
                # Mostly under way: autograd's hooks started it inside the last backward.
                assert item.bucket is not None
                held = parts.gradients[item.stage] if stream is None else stream.gradients_of(item)
                held.reduce(item.bucket)
            elif kind is Kind.GATHER:
                parts.mains.gather(item.stage, self.gather_started)
            else:
                raise NotImplementedError(f"{item}: the runtime has no {kind.value}")
            if parts.activations is not None:
                parts.activations.sample(place)
        beat[STATE] = PHASE | Phase.SENDING
        mailbox.finish()
        return compute.result

    def abandon(self, program: Program) -> None:
        """Takes in and forgets what has been sent to this rank before all stopped at their cut."""
        mailbox = self._parts.mailbox
        for item in receives_to_discard(program, self._rank):
            mailbox.discard(item)
        mailbox.finish()

    def reduction_started(self, stage: int, bucket: int, work: Any) -> None:
        """Stamps a REDUCE when it starts and, from the backend's thread, when it ends."""
        self._stamp_channel(self._places.get((stage, bucket)), work)

    def gather_started(self, stage: int, work: Any) -> None:
        self._stamp_channel(self._places.get((stage, None)), work)

    def _watch_exchanges(self, host: Instruction, places: Sequence[Sequence[int]]) -> None:
        """Stamps the exchanges inside of a computation; ``places`` are those of each of its parts.

        What a backward runs again (layers that keep little) exchanges once more, unstamped.
        """
        ranks, turns = self._parts.expert_ranks, self._parts.turns
        assert ranks is not None
        left = [iter(own) for own in places]
        backward = [part.kind in BACKWARD_KINDS for part in host.parts]

        def begun(work: Any, gradients: bool) -> None:
            part = 0 if turns is None or len(left) < 2 else turns.whose
            if part < len(left) and gradients == backward[part]:
                self._stamp_channel(next(left[part], None), work)

        ranks.watch = begun

    def _stamp_channel(self, place: int | None, work: Any) -> None:
        recorder = self._parts.recorder
        record = recorder.current
        if record is None or place is None:
            return
        record.start[place] = record.end[place] = recorder.stamp()
        if work is not None:
            recorder.stamp_end_of(work, record, place)

    def _route_of(self, program: Program) -> _Route:
        # Keyed by identity: programs are immutable and kept alive here.
        known = self._routes.get(id(program))
        if known is None:
            known = (program, _Route.of(program, self._rank))
            self._routes[id(program)] = known
        return known[1]


@dataclass(frozen=True)
class _Route:
    """One rank's list of a program, with what the executor derives from it once."""

    row: tuple[Instruction, ...]
    receives: tuple[int, ...]  # places of the RECVs, in order
    exchanges: dict[int, tuple[range, ...]]  # place of compute -> of its parts' exchanges
    release: dict[int, tuple[Instruction, ...]]  # place of a RECV -> SENDs that have arrived then
    awaited: dict[int, tuple[Instruction, ...]]  # place of a SEND -> RECVs of the next compute
    # Each with its kind, what it computes (nothing for messages and collectives), and which of that
    # makes a stage's last gradient where the REDUCE overlaps.
    items: tuple[tuple[Instruction, Kind, tuple[Instruction, ...], tuple[bool, ...]], ...]
    channel: dict[tuple[int, int | None], int]  # (stage, bucket) -> place of what is on the channel
    last_forward: int  # place of the last F, or of the loss behind it; -1 without one
    recomputed: frozenset[tuple[int, int | None]]  # (stage, microbatch) that keep their input only
    one_loss: bool  # whether some rank has a LOSS
    num_forwards: int  # of each microbatch on this rank
    program: Program
    rank: int

    @cached_property
    def cut(self) -> int:
        """Before which place the verdict on the update before must be in."""
        return speculation_limits(self.program)[self.rank]

    @classmethod
    def of(cls, program: Program, rank: int) -> _Route:
        row = program.ranks[rank]
        last: dict[int, int] = {}
        arming: set[tuple[int, int]] = set()
        last_forward = -1
        for place, item in enumerate(row):
            for part in item.parts:
                if part.kind in GRADIENT_KINDS:
                    last[part.stage] = place
                elif part.kind in (Kind.F, Kind.LOSS):
                    last_forward = place
            if item.kind is Kind.REDUCE and not item.after and item.stage in last:
                # Behind it backwards may follow that add to another update's gradient.
                arming.add((last[item.stage], item.stage))
        forwards = [part for item in row for part in item.parts if part.kind is Kind.F]
        inside: dict[int, tuple[range, ...]] = {}
        end = len(row)
        for place, item in enumerate(row if program.exchanges else ()):
            counts = (len(list(exchanges(part, program.exchanges))) for part in item.parts)
            inside[place] = tuple(range(end, end := end + count) for count in counts)
        return cls(
            row=row,
            exchanges=inside,
            receives=tuple(p for p, item in enumerate(row) if item.kind is Kind.RECV),
            release=release_points(program, rank),
            awaited=_awaited(row),
            items=tuple(
                (
                    item,
                    item.kind,
                    item.parts if item.kind in MICROBATCH_KINDS else (),
                    tuple((place, part.stage) in arming for part in item.parts),
                )
                for place, item in enumerate(row)
            ),
            channel={
                (item.stage, item.bucket): place
                for place, item in enumerate(row)
                if item.kind in CHANNEL_KINDS
            },
            last_forward=last_forward,
            recomputed=frozenset((i.stage, i.microbatch) for i in row if i.kind is Kind.R),
            num_forwards=len(forwards) // max(1, len({part.microbatch for part in forwards})),
            one_loss=any(item.kind is Kind.LOSS for each in program.ranks for item in each),
            program=program,
            rank=rank,
        )


def _awaited(row: Sequence[Instruction]) -> dict[int, tuple[Instruction, ...]]:
    """By place of each SEND with compute behind it, whose messages that consumes."""
    receives = {
        (item.payload, item.stage, item.microbatch): item for item in row if item.kind is Kind.RECV
    }
    found: dict[int, tuple[Instruction, ...]] = {}
    following: tuple[Instruction, ...] | None = None
    for place in range(len(row) - 1, -1, -1):
        item = row[place]
        if item.kind in MICROBATCH_KINDS:
            wanted = (
                receives.get((KINDS[part.kind].receives, part.stage, part.microbatch))
                for part in item.parts
            )
            following = tuple(receive for receive in wanted if receive is not None)
        elif item.kind is Kind.SEND and following is not None:
            found[place] = following
    return found
