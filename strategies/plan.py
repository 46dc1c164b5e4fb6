"""What the compiler is asked for: everything that decides a program, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from strategies.costs.table import Costs
from strategies.errors import PlanError
from strategies.recompute import NO_RECOMPUTE, Recompute
from strategies.schedule_file import ScheduleFile

Overlap = Literal["none", "grad_reduce", "zero1"]
OVERLAPS: tuple[Overlap, ...] = ("grad_reduce", "none", "zero1")


@dataclass(frozen=True, slots=True)
class Plan:
    """The degrees and policies of one run.

    Attributes:
        schedule: Registry name.
        pp: Pipeline ranks.
        num_microbatches: M per step and DP replica.
        stages_per_rank: V; None for the schedule's default.
        group: N microbatches per round; None for the schedule's default, which ``foldx`` chooses
            by simulation.
        overlap: When gradient reductions start; with ``zero1`` they scatter, each replica updates
            its share of the weights, and these are gathered under the next step's forwards.
        buckets: Reduction buckets: one number for every stage, or one per stage; 0 for none.
        split_backward: Split every B of a schedule that does not split by itself into I and W.
        costs: What instructions take, for everything that is ordered by time: zero-bubble orders,
            ``foldx``'s group, messages. Hashable; None for F = I = W and free messages.
        memory_bytes: Limit per rank for ``foldx``'s group and ``recompute=optimal``; None for no
            limit.
        file: What ``schedule=custom`` takes its order from.
        recompute: Which forwards keep their input only.
        skips: Pairs of stages that are no neighbours, between which the model sends tensors.
    """

    schedule: str = "1f1b"
    pp: int = 1
    num_microbatches: int = 1
    stages_per_rank: int | None = None
    group: int | None = None
    overlap: Overlap = "grad_reduce"
    buckets: int | tuple[int, ...] = 1
    split_backward: bool = False
    costs: Costs | None = None
    memory_bytes: int | None = None
    file: ScheduleFile | None = None
    recompute: Recompute = NO_RECOMPUTE
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        counts = (self.buckets,) if isinstance(self.buckets, int) else self.buckets
        if min(counts, default=0) < 0:
            raise PlanError(f"buckets={self.buckets}: a number of buckets is 0 or more.")
        if self.overlap not in OVERLAPS:
            raise PlanError(
                f"overlap={self.overlap} is unknown. Try overlap={' or overlap='.join(OVERLAPS)}."
            )


def num_buckets(num_bytes: int, bucket_mb: float) -> int:
    """Buckets for a stage's gradient: equal shares of at most ``bucket_mb`` MiB, at least one.

    Raises:
        PlanError: ``bucket_mb`` is not a size.

    >>> num_buckets(60 * 2**20, 25.0)
    3
    """
    if not bucket_mb > 0:
        raise PlanError(f"overlap.bucket_mb={bucket_mb:g} is no size. Try overlap.bucket_mb=25.")
    return max(1, math.ceil(num_bytes / (bucket_mb * 2**20)))
