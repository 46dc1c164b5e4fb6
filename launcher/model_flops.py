"""Model FLOPs of a training step, and what share of the hardware's peak they are (MFU).

What the model itself asks for, whatever a run does on top: matrix products of the forward and twice
as many in the backward, attention scores over the whole sequence, no recomputation, no padding
(Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311, appendix B).
"""

from __future__ import annotations

from launcher.resolve import Run
from launcher.workloads.specs import model_units


def step_flops(run: Run) -> int | None:
    """FLOPs of one optimizer step over all replicas, two per multiply-add.

    None where only the ranks know the model.
    """
    if run.own_model:
        return None
    forward = sum(unit.forward_flops for unit in model_units(run.shape))
    sequences = run.batch_size * run.dp * run.config.trainer.accumulate_grad_batches
    return 3 * forward * sequences


def ideal_step_s(run: Run) -> float | None:
    """Seconds that a step would take if every rank computed at ``hardware.peak_flops``.

    Over the measured time of a step that is the MFU.
    """
    flops = step_flops(run)
    return None if flops is None else flops / (run.world_size * run.config.hardware.peak_flops)
