"""What a plan decides: how many ranks of each kind, how a batch is cut, and who runs what when."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.plan import Overlap
from strategies.recompute import NO_RECOMPUTE, Recompute


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks and batches.

    Attributes:
        tp: Ranks that share the matrices of a stage.
        pp: Pipeline ranks.
        dp: Replicas.
        microbatch_size: Sequences of a microbatch.
        num_microbatches: M per step and replica.
    """

    tp: int
    pp: int
    dp: int
    microbatch_size: int
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule with everything that decides its instructions.

    Attributes:
        schedule: Registry name.
        stages_per_rank: V.
        group: Microbatches per round; None for the schedule's default.
    """

    schedule: str
    stages_per_rank: int
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that may be simulated.

    Attributes:
        layout: Ranks and batches.
        order: The schedule.
        overlap: ``grad_reduce``, ``none`` or ``zero1``.
        units: Units of each stage.
        recompute: Which forwards keep only their input.
    """

    layout: Layout
    order: Order
    overlap: Overlap
    units: tuple[int, ...]
    recompute: Recompute = NO_RECOMPUTE
