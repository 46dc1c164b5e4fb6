"""What every pass of a rank works with."""

from __future__ import annotations

from dataclasses import dataclass, field

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
