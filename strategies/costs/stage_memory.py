"""What each stage holds on a rank, in bytes and by what it is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One number per stage everywhere; of one microbatch where it is not said otherwise.

    Attributes:
        parameters: The stage's weights.
        gradients: Their sums.
        optimizer: Its state, and its own copy of the weights where there is one.
        activations: From a forward, or an R, until the backward.
        waiting: Between I and W.
        inputs: From a checkpointed forward until its R.
        outputs: The boundary tensors that the stage makes; its input's gradients are as large as
            the outputs of the stage before.
        forward_temporaries: What one F or R needs beyond what stays.
        backward_temporaries: What one B, I or W needs beyond what has been there.
    """

    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]
    activations: tuple[int, ...]
    waiting: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward_temporaries: tuple[int, ...]
    backward_temporaries: tuple[int, ...]
