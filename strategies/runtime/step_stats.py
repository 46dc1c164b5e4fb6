"""Figures of a training step over all ranks of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class RankStep(NamedTuple):
    """What one rank says of a step; sent as a JSON list.

    Attributes:
        step: Its number, as given to ``train_pass``.
        begun: First start, seconds on the host's clock.
        finished: Last end.
        squared_norm: This rank's part of the squared norm of the gradient, before clipping.
        busy_s: Compute.
        computed: When the last compute ended.
        reduced: When the last reduction ended; None where nothing is reduced.
        peak_bytes: Peak memory since the engine was made.
    """

    step: int
    begun: float
    finished: float
    squared_norm: float
    busy_s: float
    computed: float
    reduced: float | None
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class StepStats:
    """An earlier training step over all ranks of the pipeline, known one step later.

    Attributes:
        step: Its number, as given to ``train_pass``.
        makespan_s: First start to last end over the ranks.
        busy_s: Compute of all ranks together.
        bubble_ratio: Idle over P * makespan.
        gradient_norm: 2-norm of the whole model's gradient, before clipping.
        exposed_grad_reduce_s: How long the last reduction outlasted the last compute; 0 when
            hidden, None where nothing is reduced.
        peak_memory_bytes: Per pipeline rank, of its sharers the largest; since the engine was made.
    """

    step: int
    makespan_s: float
    busy_s: float
    bubble_ratio: float
    gradient_norm: float
    exposed_grad_reduce_s: float | None = None
    peak_memory_bytes: tuple[int, ...] = ()


def joined_stats(said: Sequence[Sequence[Any] | None], *, tp: int) -> StepStats | None:
    """What the ranks of a replica say together; None unless all speak of the same step.

    Args:
        said: ``RankStep`` per rank of the replica (pipeline ranks, each with its sharers).
        tp: Sharers of each pipeline rank.
    """
    ranks = [RankStep(*entry) for entry in said if entry is not None]
    if len(ranks) < len(said) or len({rank.step for rank in ranks}) != 1:
        return None
    makespan = max(rank.finished for rank in ranks) - min(rank.begun for rank in ranks)
    busy = sum(rank.busy_s for rank in ranks)
    ends = [rank.reduced for rank in ranks if rank.reduced is not None]
    peaks = [rank.peak_bytes for rank in ranks]
    exposed = max(0.0, max(ends) - max(rank.computed for rank in ranks)) if ends else None
    return StepStats(
        step=int(ranks[0].step),
        makespan_s=makespan,
        busy_s=busy,
        bubble_ratio=1.0 - busy / (len(ranks) * makespan),
        gradient_norm=math.sqrt(sum(rank.squared_norm for rank in ranks)),
        exposed_grad_reduce_s=exposed,
        peak_memory_bytes=tuple(max(peaks[i : i + tp]) for i in range(0, len(peaks), tp)),
    )
