"""Whether a training may update before the verdict on its step is in, and who must wait for it.

Everything that looks at weights between two steps would see an update that may still be undone.
So either nothing does, as far as anybody can know, or ranks wait at the flush as they always have.
What runs at the ends of epochs, before a validation and before a checkpoint waits for the verdict
first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from strategies.runtime.lightning.refusals import weight_readers
from strategies.runtime.update.main_optimizer import ELEMENTWISE

# Hooks before an update and between two steps, besides those of every batch.
_MEANWHILE = (
    "on_before_optimizer_step", "on_before_batch_transfer", "on_after_batch_transfer",
    "transfer_batch_to_device",
)  # fmt: skip
# Hooks of a module around its update; what they do would be undone with it, or be missing. The last
# two run before a validation, ahead of all callbacks, and may write into the gradients.
_AROUND = (
    "on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step",
    "on_validation_model_zero_grad", "zero_grad",
)  # fmt: skip


class ConfirmedWeights(pl.Callback):
    """Waits for the verdict on the last update before other hooks; of no cost where it is in."""

    reads_weights = False

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete = complete

    def _now(self, *_: Any, **__: Any) -> None:
        self._complete()

    on_train_epoch_start = on_train_epoch_end = on_train_end = _now
    on_sanity_check_start = on_validation_start = _now


def why_it_waits(trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> str:
    """Why updates wait for their verdict; empty where they need not.

    The same on all ranks: it looks at classes and configuration alone.
    """
    if not module.automatic_optimization:
        return "the module optimizes by hand"
    if trainer.gradient_clip_algorithm not in (None, "norm") and trainer.gradient_clip_val:
        return "gradients are clipped by value"
    if is_overridden("configure_gradient_clipping", module):
        return "the module clips by itself"
    kind = type(optimizer)
    if kind not in ELEMENTWISE and not getattr(kind, "repeatable", False):
        return f"{kind.__name__} is not known to make the same update twice"
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(optimizer, name, None) for name in hooks):
        return f"{kind.__name__} has hooks around its step"
    for name in _AROUND:
        if is_overridden(name, module):
            return f"{type(module).__name__}.{name} is around the update"
    readers = weight_readers(trainer, module, more=_MEANWHILE)
    if readers:
        return f"{', '.join(readers)} may look at weights between two steps"
    return _hooked(module)


def _hooked(module: nn.Module) -> str:
    """Forwards that run twice would call people's hooks twice."""
    for name, layer in module.named_modules():
        if layer._forward_hooks or layer._forward_pre_hooks:
            return f"{name or type(module).__name__} has forward hooks"
    return ""
