"""A program: all ranks' ordered instruction lists, the body of the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, MESSAGE_KINDS, Kind

if TYPE_CHECKING:
    from strategies.ir.graph import FlatProgram, Graph, Transfer


# --------------------------------------------------------------------------------------------------
# Which rank owns a stage, and which runs a microbatch through it. Nothing else maps the two.


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages to ranks, once per weight copy.

    Attributes:
        name: ``loop``, ``v`` or ``bidirectional``.
        num_ranks: P.
        copies: ``copies[c][stage]`` is the rank that holds copy ``c`` of ``stage``. Microbatch
            ``m`` runs on copy ``m % len(copies)``.
    """

    name: str
    num_ranks: int
    copies: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        """S, virtual stages included."""
        return len(self.copies[0])

    @property
    def weight_copies(self) -> int:
        return len(self.copies)

    @property
    def stages_per_rank(self) -> int:
        """V: the stages that one rank owns, weight copies included."""
        return self.num_stages * self.weight_copies // self.num_ranks

    @property
    def stages_per_microbatch(self) -> float:
        """The stages of one rank that one microbatch crosses: V, or V / 2 with two copies.

        The mean over the ranks, where a user's placement gives them unequal numbers.
        """
        return self.num_stages / self.num_ranks

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.copies[microbatch % len(self.copies)][stage]

    def owners(self, stage: int) -> tuple[int, ...]:
        """All ranks that hold the weights of ``stage``, ascending."""
        if len(self.copies) == 1:
            return (self.copies[0][stage],)
        return tuple(sorted({copy[stage] for copy in self.copies}))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, ascending."""
        return _stages_of_ranks(self).get(rank, ())


@lru_cache(maxsize=4096)
def _stages_of_ranks(placement: Placement) -> dict[int, tuple[int, ...]]:
    """Ascending; of all ranks at once, since callers look up hundreds one by one."""
    found: dict[int, list[int]] = {}
    for stage, owners in enumerate(zip(*placement.copies, strict=True)):
        for rank in dict.fromkeys(owners):
            found.setdefault(rank, []).append(stage)
    return {rank: tuple(stages) for rank, stages in found.items()}


def loop(num_ranks: int, stages_per_rank: int) -> Placement:
    """Stage s lies on rank s mod P.

    >>> loop(2, 2).copies
    ((0, 1, 0, 1),)
    """
    stages = range(num_ranks * stages_per_rank)
    return Placement("loop", num_ranks, (tuple(stage % num_ranks for stage in stages),))


def v(num_ranks: int, stages_per_rank: int = 2) -> Placement:
    """Every second row of stages runs backwards, so that a row's last rank starts the next.

    >>> v(3).copies
    ((0, 1, 2, 2, 1, 0),)
    """
    row = tuple(range(num_ranks))
    rows = (row if index % 2 == 0 else row[::-1] for index in range(stages_per_rank))
    return Placement("v", num_ranks, (tuple(rank for row in rows for rank in row),))


def bidirectional(num_ranks: int) -> Placement:
    """Two weight copies in opposite directions: even microbatches run down, odd ones up.

    >>> bidirectional(3).copies
    ((0, 1, 2), (2, 1, 0))
    """
    down = tuple(range(num_ranks))
    return Placement("bidirectional", num_ranks, (down, down[::-1]))


PLACEMENTS = ("loop", "v", "bidirectional")


# --------------------------------------------------------------------------------------------------
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
class Updates:
    """When a program that has several updates of the weights makes them.

    Update u, counted from 0, takes the gradients of microbatches u * size and on, and makes version
    u + 1 of the weights; version 0 is what training begins with.

    Attributes:
        size: Microbatches whose gradients make one update.
        delay: Per stage, by how many updates the weights that a microbatch reads are older than
            those that training without a pipeline would read.
        per_step: Microbatches of one batch. A step of the training loop is one batch, whatever an
            update takes.
        feeds_back: Whether an update is corrected by the one before: ranks keep that, and what the
            weights were before the one that is made.
        begun: Microbatches of the first update that earlier steps have accumulated, < size.
    """

    size: int
    delay: tuple[int, ...]
    per_step: int = 1
    feeds_back: bool = False
    begun: int = 0

    @property
    def steps(self) -> int:
        """Over how many batches an update goes; 1 also for less than one."""
        return max(1, self.size // self.per_step)

    def of(self, microbatch: int) -> int:
        """The update that takes a microbatch's gradient."""
        return (microbatch + self.begun) // self.size

    def first(self, update: int) -> int:
        """Its first microbatch; below 0 where earlier steps have accumulated some."""
        return update * self.size - self.begun

    def version_read(self, stage: int, microbatch: int) -> int:
        return max(self.of(microbatch) - self.delay[stage], 0)

    def first_reader(self, stage: int, version: int) -> int:
        """The first microbatch that reads a version; it may be none of the program's."""
        return self.first(version + self.delay[stage])


@dataclass(frozen=True)
class Program:
    """One iteration on every rank, or several that run into each other.

    Attributes:
        schedule: Name of the policy that made it.
        num_microbatches: M.
        ranks: ``ranks[r]`` is rank r's ordered list.
        boundaries: The stage graph; default: each stage to the next.
        role: ``train`` (all), ``accumulate`` (no REDUCE, no STEP) or ``forward`` (F only).
        lowered: Whether SEND and RECV stand in the lists.
        updates: When the weights are updated; None where all microbatches make one update, at the
            end.
        exchanges: Per stage, how many of its layers exchange tokens of experts with other ranks,
            inside of its computations (``instruction.exchanges``); () for none.
    """

    schedule: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Instruction, ...], ...]
    boundaries: tuple[Boundary, ...]
    role: Role = "train"
    lowered: bool = False
    updates: Updates | None = None
    exchanges: tuple[int, ...] = ()

    @property
    def steps(self) -> float:
        """How many batches it has: 1 with a flush."""
        return 1.0 if self.updates is None else self.num_microbatches / self.updates.per_step

    @property
    def feeds_back(self) -> bool:
        return self.updates is not None and self.updates.feeds_back

    @property
    def versions(self) -> Sequence[int | None]:
        """What its updates make: of one update, weights without a number."""
        if self.updates is None:
            return (None,)
        return range(1, self.updates.of(self.num_microbatches - 1) + 2)

    def version_made(self, microbatch: int) -> int | None:
        """By the update that takes a microbatch's gradient; None where there is one update."""
        return None if self.updates is None else self.updates.of(microbatch) + 1

    def microbatches_of(self, version: int | None) -> range:
        """Those whose gradients make a version; all of them where there is one update."""
        if self.updates is None or version is None:
            return range(self.num_microbatches)
        first, end = self.updates.first(version - 1), self.updates.first(version)
        return range(max(first, 0), min(end, self.num_microbatches))

    @cached_property
    def dependencies(self) -> Graph:
        """What each instruction needs, without an order; derived once.

        Raises:
            ProgramError: A value is missing, made twice, or of no use.
        """
        from strategies.ir.values import build_dependencies

        return build_dependencies(self)

    @cached_property
    def graph(self) -> Graph:
        """Dependencies and one linear extension, derived once.

        Raises:
            ProgramError: As ``dependencies``, or the lists deadlock.
        """
        from strategies.ir.graph import ordered

        return ordered(self)

    @cached_property
    def transfers(self) -> list[Transfer]:
        """What crosses between ranks, before it is lowered."""
        from strategies.ir.graph import find_transfers

        return find_transfers(self)

    @cached_property
    def flat(self) -> FlatProgram:
        from strategies.ir.graph import flatten_program

        return flatten_program(self)

    def with_ranks(self, ranks: tuple[tuple[Instruction, ...], ...]) -> Program:
        """The same program with other lists; what passes return."""
        return replace(self, ranks=ranks)

    def compute_rows(self) -> tuple[tuple[Instruction, ...], ...]:
        return tuple(
            tuple(item for item in row if item.kind not in MESSAGE_KINDS) for row in self.ranks
        )


def chain(num_stages: int) -> tuple[Boundary, ...]:
    return tuple(Boundary(stage, stage + 1) for stage in range(num_stages - 1))


def last_gradients(program: Program, rank: int) -> dict[tuple[int, int | None], int]:
    """(stage, version made) -> place of its last B or W in a rank's list."""
    return {
        (part.stage, program.version_made(part.microbatch)): place
        for place, item in enumerate(program.ranks[rank])
        for part in item.parts
        if part.kind in GRADIENT_KINDS and part.microbatch is not None
    }


def recomputed_pairs(program: Program) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) pairs with an R anywhere: their forwards keep their input only."""
    return frozenset(
        (item.stage, item.microbatch)
        for row in program.ranks
        for item in row
        if item.kind is Kind.R and item.microbatch is not None
    )
