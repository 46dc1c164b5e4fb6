"""What every pass of a rank works with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from strategies.models.stage_model import StageModel
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks
from strategies.runtime.messages.mailbox import Mailbox
from strategies.runtime.step.activation_bytes import ActivationBytes
from strategies.runtime.step.pulse import Pulse
from strategies.runtime.step.recompute import Recomputation
from strategies.runtime.step.recorder import Recorder
from strategies.runtime.update.grad_sync import StageGradients
from strategies.runtime.update.main_weights import AllMainWeights
from strategies.runtime.update.nan_guard import NanWatch


@dataclass
class RankParts:
    """The parts of one rank; each pass uses them, none of them belongs to a pass.

    Attributes:
        model: The rank's stages.
        mailbox: Boundary tensors, in and out.
        gradients: By stage; filled when training begins.
        mains: What the optimizer updates.
        recorder: When instructions ran.
        pulse: What the rank is doing, for whoever watches it.
        recomputation: Checkpointed forwards.
        tensor_ranks: Who shares the matrices; None alone.
        watch: Notes what is not finite; None to look at nothing.
        activations: Measures what is held for backwards; None to measure nothing.
        begins_in_place: Stages whose first operation changes its input, found while running.
    """

    model: StageModel
    mailbox: Mailbox
    gradients: dict[int, StageGradients]
    mains: AllMainWeights
    recorder: Recorder
    pulse: Pulse
    recomputation: Recomputation
    tensor_ranks: TensorRanks | None = None
    watch: NanWatch | None = None
    activations: ActivationBytes | None = None
    begins_in_place: set[int] = field(default_factory=set)


# ----------------------------------------------------------------------------------------- options
#
# What a user chooses for the running pipeline beside the plan.


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
