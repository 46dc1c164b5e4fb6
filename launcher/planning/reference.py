"""A small training that stands for any other where a machine is measured."""

from __future__ import annotations

from dataclasses import replace

from launcher.config import LaunchConfig
from launcher.config.pipeline import ProfileConfig

# Of a laptop's size; two sizes of microbatches tell FLOPs from what comes beside them.
_LAYERS, _VOCAB, _SIZES, _ITERATIONS, _STEPS = 4, 256, (1, 2), 3, 8


def reference(config: LaunchConfig, world: int) -> LaunchConfig:
    """A short training of a small model on so many replicas, computed in as ``config`` does."""
    default = LaunchConfig()
    return replace(
        default,
        dp=world,
        num_microbatches=1,
        model=replace(default.model, layers=_LAYERS, vocab=_VOCAB),
        trainer=replace(
            default.trainer,
            precision=config.trainer.precision,
            accelerator=config.trainer.accelerator,
            float32_matmul_precision=config.trainer.float32_matmul_precision,
            max_steps=_STEPS,
            val_check_interval=None,
            save_last=False,
        ),
        cluster=replace(default.cluster, backend=config.cluster.backend),
        profile=ProfileConfig(microbatch_sizes=_SIZES, iterations=_ITERATIONS),
    )
