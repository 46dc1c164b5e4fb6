"""A program: all ranks' ordered instruction lists, the body of the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, MESSAGE_KINDS, Kind
from strategies.ir.placement import Placement

if TYPE_CHECKING:
    from strategies.ir.graph import Graph
    from strategies.ir.walk import Walk


Role = Literal["train", "accumulate", "forward"]


@dataclass(frozen=True, slots=True)
class Boundary:
    """Tensors that go from one stage to a later one.

    Attributes:
        source: Stage that makes them.
        target: Stage that uses them, > source; more than one further on for a long skip.
        tensors: Their names, in the order in which they travel; fixed when the model is cut.
    """

    source: int
    target: int
    tensors: tuple[str, ...] = ("hidden",)


@dataclass(frozen=True, slots=True)
class LoopState:
    """What is alive between two iterations of a program; empty for synchronous schedules.

    Attributes:
        in_flight: (stage, microbatch) pairs whose forward ran in the iteration before.
        versions: Weight versions alive per stage; () means one.
    """

    in_flight: tuple[tuple[int, int], ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """One iteration on every rank.

    Attributes:
        schedule: Name of the policy that made it.
        num_microbatches: M.
        ranks: ``ranks[r]`` is rank r's ordered list.
        boundaries: The stage graph; default: each stage to the next.
        role: ``train`` (all), ``accumulate`` (no REDUCE, no STEP) or ``forward`` (F only).
        lowered: Whether SEND and RECV stand in the lists.
        entry: What is alive before the first instruction.
        exit: What is alive after the last one.
        per_update: Microbatches per update of the weights, where a program has several: update u
            takes the gradients of microbatches u * per_update and on, and makes version u + 1.
            None where all of them make one update, at the end.
        per_batch: Microbatches of one batch, where a program has several: a step of the training
            loop is as many, whatever an update takes.
        feeds_back: Whether an update is corrected by the one before: ranks keep that, and what
            the weights were before the one that is made.
        begun: Microbatches whose gradients the first of several updates has from before.
    """

    schedule: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Instruction, ...], ...]
    boundaries: tuple[Boundary, ...]
    role: Role = "train"
    lowered: bool = False
    entry: LoopState = field(default_factory=LoopState)
    exit: LoopState = field(default_factory=LoopState)
    per_update: int | None = None
    per_batch: int | None = None
    feeds_back: bool = False
    begun: int = 0

    def update_of(self, microbatch: int) -> int | None:
        """The version that a microbatch's gradient makes; None where there is one update."""
        if self.per_update is None:
            return None
        return (microbatch + self.begun) // self.per_update + 1

    @cached_property
    def graph(self) -> Graph:
        """Dependencies and one linear extension, derived once.

        Raises:
            ProgramError: The lists deadlock.
        """
        from strategies.ir.graph import build_graph

        return build_graph(self)

    @cached_property
    def walk(self) -> Walk:
        from strategies.ir.walk import flatten

        return flatten(self)

    def with_ranks(self, ranks: tuple[tuple[Instruction, ...], ...]) -> Program:
        """The same program with other lists; what passes return."""
        return replace(self, ranks=ranks)

    def compute_rows(self) -> tuple[tuple[Instruction, ...], ...]:
        return tuple(
            tuple(item for item in row if item.kind not in MESSAGE_KINDS) for row in self.ranks
        )


def chain(num_stages: int) -> tuple[Boundary, ...]:
    return tuple(Boundary(stage, stage + 1) for stage in range(num_stages - 1))


def last_gradients(row: Sequence[Instruction]) -> dict[int, int]:
    """Stage -> place of its last B or W in a rank's list."""
    return {
        part.stage: place
        for place, item in enumerate(row)
        for part in item.parts
        if part.kind in GRADIENT_KINDS
    }


def recomputed_pairs(program: Program) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) pairs with an R anywhere: their forwards keep their input only."""
    return frozenset(
        (item.stage, item.microbatch)
        for row in program.ranks
        for item in row
        if item.kind is Kind.R and item.microbatch is not None
    )
