"""What a pipeline cannot train as it should be: said before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from strategies.compiled_units import refuse_selective, refuse_split_backward
from strategies.errors import ModelError
from strategies.plan import Plan
from strategies.runtime.nan_guard import OnNan
from strategies.schedules import find_schedule


def refuse_module(
    trainer: pl.Trainer, module: pl.LightningModule, plan: Plan, *, compiled: bool
) -> None:
    """Refuses modules and callbacks that decide what the program decides.

    Args:
        trainer: With the user's callbacks.
        module: The user's.
        plan: What is to be run.
        compiled: Whether units go through ``torch.compile``.

    Raises:
        ModelError: With the reason and what to do.
    """
    if not module.automatic_optimization:
        raise ModelError(
            f"{type(module).__name__} uses manual optimization, which decides when backward "
            "runs; the pipeline program decides that here. Remove "
            "automatic_optimization=False, or use another strategy."
        )
    found = find_schedule(plan.schedule, file=plan.file, pp=plan.pp)
    running = [n for n, m in module.named_modules() if getattr(m, "track_running_stats", False)]
    if found.weight_copies > 1 and running:
        raise ModelError(
            f"{running[0]} keeps running statistics; schedule={found.name} holds every stage "
            "twice: each copy would see half of the microbatches, and the two would differ in "
            "evaluation. Try schedule=zb_v, or track_running_stats=False."
        )
    if compiled and trainer.state.fn == TrainerFn.FITTING:
        asked = plan.split_backward
        refuse_split_backward(found.name, own=found.splits_backward, asked=asked)
        refuse_selective(plan.recompute.policy)
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise ModelError("compile the layers inside the module, not the LightningModule.")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        copies = isinstance(callback, StochasticWeightAveraging)
        if copies or type(callback).__name__ in ("WeightAveraging", "EMAWeightAveraging"):
            raise ModelError(
                f"the callback {type(callback).__name__} copies the whole model before it is "
                f"cut into {plan.pp} ranks and would average the wrong weights. Remove it."
            )


def refuse_optimizers(optimizers: Iterable[Optimizer], *, world_size: int, on_nan: OnNan) -> None:
    """Refuses optimizers that run a step as often as each rank likes.

    Raises:
        ModelError: With the reason and what to do.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.LBFGS):
            continue
        if world_size > 1:
            raise ModelError(
                "LBFGS decides on each rank by itself how often it runs the step, so the ranks "
                "would wait for each other for ever. Use another optimizer, or pp=1 dp=1."
            )
        if on_nan == "skip":
            raise ModelError(
                "LBFGS moves the weights several times in a step, so none can be left out as a "
                "whole. Use on_nan=stop, or another optimizer."
            )
