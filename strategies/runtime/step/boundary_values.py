"""The boundary tensors of one pass: which are here, which are waited for, which are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from strategies.heartbeat import STATE, WAITING
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import KINDS, Kind
from strategies.ir.program import Program
from strategies.models.stage_model import StageOutput
from strategies.runtime.messages.mailbox import Mailbox, Values
from strategies.runtime.step.pulse import Pulse
from strategies.runtime.step.recorder import StepRecord


class BoundaryValues:
    """What stages hand to each other on this rank and through its mailbox.

    Values are kept under their payload (``F`` activations, ``B`` gradients), the stage that made
    them, the stage that they are for, and the microbatch.
    """

    def __init__(self, program: Program, mailbox: Mailbox, pulse: Pulse) -> None:
        self._placement = program.placement
        self._mailbox = mailbox
        self._beat = pulse.words
        self._links = _Links.of(program)
        self._values: dict[tuple[Kind, int, int, int], Values] = {}
        # By what they bring, as values are kept: the RECVs that the list has come past.
        self._received: dict[tuple[Kind, int, int, int], tuple[int, Instruction]] = {}
        self._releasable: dict[Instruction, list[Instruction]] = {}

    def continue_with(self, program: Program) -> None:
        """Goes on with another program of the same stages, keeping what is here."""
        assert program.placement == self._placement
        self._received.clear()

    def passed(self, receive: Instruction, place: int, released: Iterable[Instruction]) -> None:
        """Notes that the list has come past a RECV, and which SENDs its arrival lets go."""
        assert receive.payload is not None
        assert receive.peer is not None
        assert receive.microbatch is not None
        here = (receive.payload, receive.peer, receive.stage, receive.microbatch)
        self._received[here] = place, receive
        for ended in released:
            self._releasable.setdefault(receive, []).append(ended)

    def collect(self, item: Instruction, record: StepRecord, stamp: Callable[[], Any]) -> Values:
        """The boundary tensors that F, B or I consumes: received, or handed over on this rank."""
        assert item.microbatch is not None
        if item.kind is Kind.R:
            gradient = Instruction(Kind.B, item.stage, item.microbatch)
            for edge in item.after:
                if edge.payload is Kind.B and edge.peer is not None:
                    # It waits for its gradient, which its backward will ask for.
                    here = (Kind.B, edge.peer, item.stage, item.microbatch)
                    self._values[here] = self._value(gradient, Kind.B, edge.peer, record, stamp)
        payload = KINDS[item.kind].receives
        if payload is None:
            return ()
        others = (self._links.sources if payload is Kind.F else self._links.targets)[item.stage]
        parts = [self._value(item, payload, other, record, stamp) for other in others]
        return tuple(tensor for part in parts for tensor in part)

    def _value(
        self,
        item: Instruction,
        payload: Kind,
        other: int,
        record: StepRecord,
        stamp: Callable[[], Any],
    ) -> Values:
        assert item.microbatch is not None
        here = (payload, other, item.stage, item.microbatch)
        known = self._values.pop(here, None)
        if known is not None:
            return known
        place, receive = self._received[here]
        self._beat[STATE] = place << 1 | WAITING
        tensors = self._mailbox.wait(receive)
        record.end[place] = stamp()
        for ended in self._releasable.pop(receive, ()):
            self._mailbox.release(ended)
        return tensors

    def flags(self, item: Instruction) -> list[tuple[bool, ...]]:
        """Per stage that hands tensors to this one, which of them want a gradient."""
        assert item.microbatch is not None
        return [
            self._mailbox.gradient_flags(source, item.stage, item.microbatch)
            for source in self._links.sources[item.stage]
        ]

    def hand_on(self, item: Instruction, output: StageOutput) -> None:
        """Keeps what a forward made for the stages behind it."""
        assert item.microbatch is not None
        for target, part in self._links.deal(item.stage, output):
            self._mailbox.describe(item.stage, target, item.microbatch, part)
            detached = tuple(map(_as_it_is_now, part))
            self._values[Kind.F, item.stage, target, item.microbatch] = detached

    def hand_back(self, item: Instruction, inputs: tuple[Tensor, ...]) -> None:
        """Keeps the gradients of a stage's inputs for the stages before it; some may be none."""
        assert item.microbatch is not None
        leaves = iter(inputs)
        for source, flags in zip(self._links.sources[item.stage], self.flags(item), strict=True):
            part = islice(leaves, len(flags))
            self._values[Kind.B, item.stage, source, item.microbatch] = tuple(
                leaf.grad for leaf in part if leaf.requires_grad
            )

    def send(self, item: Instruction, *, busy: bool) -> None:
        assert item.payload is not None
        assert item.microbatch is not None
        assert item.peer is not None
        tensors = self._values.pop((item.payload, item.stage, item.peer, item.microbatch))
        self._mailbox.send(item, tensors, busy=busy)


def _as_it_is_now(tensor: Tensor) -> Tensor:
    """What a stage hands on, with what it holds now.

    What has no gradient may be a buffer, which the stage's next microbatch changes before this
    one's has been used, or its message has left.
    """
    detached = tensor.detach()
    return detached.clone() if tensor.grad_fn is None else detached


@dataclass(frozen=True, slots=True)
class _Links:
    """Between which stages of a program tensors travel, from both ends; the earliest first."""

    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, program: Program) -> _Links:
        stages = range(program.placement.num_stages)
        ends = sorted((boundary.source, boundary.target) for boundary in program.boundaries)
        return cls(
            tuple(tuple(source for source, target in ends if target == stage) for stage in stages),
            tuple(tuple(target for source, target in ends if source == stage) for stage in stages),
        )

    def deal(self, stage: int, output: StageOutput) -> list[tuple[int, tuple[Tensor, ...]]]:
        """A stage's tensors by the stage that they are for; none for some, perhaps."""
        groups = output.groups
        counts = {stage + 1: len(output.tensors)} if groups is None else dict(groups)
        dealt = []
        position = 0
        for target in self.targets[stage]:
            end = position + counts.pop(target, 0)
            dealt.append((target, output.tensors[position:end]))
            position = end
        assert not counts, f"stage {stage} has tensors for {sorted(counts)}, which no message takes"
        return dealt
