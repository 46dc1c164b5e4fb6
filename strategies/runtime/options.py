"""What a user chooses for the running pipeline beside the plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chooses beside the plan.

    Attributes:
        units_per_stage: Cut by hand; None balances by cost.
        bucket_mb: Upper size of a reduction bucket, where the plan leaves their number open.
        backend: ``gloo``, ``nccl``, ``staged`` or ``strict``.
        seed: Of everything random inside the model.
        check_batches: Compare the batch between the ranks of a pipeline at every step.
        timeout_s: How long any communicator waits.
        sequence_parallel: With tp > 1, cut the stream between matrices along the sequence.
        gradient_dtype: Type in which gradients travel to be reduced; None for that of their sum.
        compile: Run each unit through ``torch.compile``.
        watch_nan: Note where a loss or a gradient is not finite, for ``leaves_out``.
    """

    units_per_stage: tuple[int, ...] | None = None
    bucket_mb: float = 25.0
    backend: str = "gloo"
    seed: int = 0
    check_batches: bool = True
    timeout_s: float = 1800.0
    sequence_parallel: bool = False
    gradient_dtype: torch.dtype | None = None
    compile: bool = False
    watch_nan: bool = False
