"""What every pass of a rank works with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from strategies.models.expert_parallel import ExpertRanks, TwoThreads
from strategies.models.stage_model import StageModel
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks
from strategies.runtime.messages.mailbox import Mailbox
from strategies.runtime.step.activation_bytes import ActivationBytes
from strategies.runtime.step.pulse import Pulse
from strategies.runtime.step.recompute import Recomputation
from strategies.runtime.step.recorder import Recorder
from strategies.runtime.step.whole_batch import WholeBatch
from strategies.runtime.update.grad_sync import StageGradients
from strategies.runtime.update.main_weights import AllMainWeights
from strategies.runtime.update.nan_guard import NanWatch
from strategies.runtime.update.weight_versions import WeightVersions


@dataclass
class RankParts:
    """The parts of one rank; each pass uses them, none of them belongs to a pass."""

    model: StageModel
    mailbox: Mailbox
    gradients: dict[int, StageGradients]  # by stage; filled when training begins
    mains: AllMainWeights
    recorder: Recorder
    pulse: Pulse
    recomputation: Recomputation
    whole: WholeBatch
    tensor_ranks: TensorRanks | None = None
    turns: TwoThreads | None = None  # where the halves of a pair run in turn
    expert_ranks: ExpertRanks | None = None  # who exchanges experts' tokens
    watch: NanWatch | None = None  # of what is not finite
    activations: ActivationBytes | None = None
    versions: WeightVersions | None = None  # of the weights, where updates come between F and B
    replicas: dist.ProcessGroup | None = None  # what a step sees as all processes
    # Stages whose first operation changes its input, found while running.
    begins_in_place: set[int] = field(default_factory=set)
