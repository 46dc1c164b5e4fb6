"""One instruction of one rank: the only thing that is scheduled, simulated and executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from strategies.ir.kinds import Kind  # an instruction's first word, found beside it


@dataclass(frozen=True, slots=True)
class Instruction:
    """``2F0``: stage 2, forward, microbatch 0.

    Attributes:
        stage: Global stage index, virtual stages included.
        microbatch: For F B I W R SEND RECV, else None.
        bucket: For REDUCE, else None.
        payload: For SEND and RECV: F carries activations, B carries their gradients.
        peer: For SEND and RECV: the stage at the other end.
        after: Instructions that must have ended first, beyond what the data needs. A REDUCE
            without it is released bucket by bucket inside its stage's last backward.
        version: Weight version used or made; None in synchronous programs.
        halves: For OVERLAP, its F and its B (or I); stage and microbatch are those of the F.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    bucket: int | None = None
    payload: Kind | None = None
    peer: int | None = None
    after: tuple[Instruction, ...] = ()
    version: int | None = None
    halves: tuple[Instruction, ...] = ()

    @property
    def parts(self) -> tuple[Instruction, ...]:
        """What is computed: the halves of an OVERLAP, else the instruction itself."""
        return self.halves or (self,)

    def __str__(self) -> str:
        from strategies.ir.text import format_instruction

        return format_instruction(self)


# Orders are made by the hundred in a search, of the same instructions: looking one up takes a tenth
# of making it.
_KEPT = 1 << 17


@lru_cache(maxsize=_KEPT)
def forward(stage: int, microbatch: int) -> Instruction:
    return Instruction(Kind.F, stage, microbatch)


@lru_cache(maxsize=_KEPT)
def backward(stage: int, microbatch: int) -> Instruction:
    return Instruction(Kind.B, stage, microbatch)


@lru_cache(maxsize=_KEPT)
def input_gradient(stage: int, microbatch: int) -> Instruction:
    """The first half of a backward: the gradient of the stage's inputs."""
    return Instruction(Kind.I, stage, microbatch)


@lru_cache(maxsize=_KEPT)
def weight_gradient(stage: int, microbatch: int) -> Instruction:
    """The second half of a backward: the gradient of the stage's weights."""
    return Instruction(Kind.W, stage, microbatch)


@lru_cache(maxsize=_KEPT)
def sending(stage: int, microbatch: int, payload: Kind, peer: int) -> Instruction:
    return Instruction(Kind.SEND, stage, microbatch, payload=payload, peer=peer)


@lru_cache(maxsize=_KEPT)
def receiving(stage: int, microbatch: int, payload: Kind, peer: int) -> Instruction:
    return Instruction(Kind.RECV, stage, microbatch, payload=payload, peer=peer)


def overlap(first: Instruction, second: Instruction) -> Instruction:
    """A forward and a backward of another microbatch, whose parts may run interleaved."""
    return Instruction(Kind.OVERLAP, first.stage, first.microbatch, halves=(first, second))


_PASSES = {Kind.F: Kind.F, Kind.R: Kind.R, Kind.B: Kind.B, Kind.I: Kind.B}


def exchanges(item: Instruction, layers: Sequence[int]) -> Iterator[Instruction]:
    """The exchanges of experts' tokens inside a computation, in their order.

    Of a fused pair those of its forward come first. ``layers`` are per stage: how many have experts
    elsewhere, () for none. A backward goes through them from the last one. Each is shown as an
    instruction: its bucket is the layer, its payload the pass, F, its R, or B.
    """
    for part in item.parts if layers else ():
        way = _PASSES.get(part.kind)
        if way is None or part.microbatch is None:
            continue
        numbers = range(layers[part.stage])
        for layer in reversed(numbers) if way is Kind.B else numbers:
            for kind in (Kind.DISPATCH, Kind.COMBINE):
                yield Instruction(kind, part.stage, part.microbatch, bucket=layer, payload=way)
