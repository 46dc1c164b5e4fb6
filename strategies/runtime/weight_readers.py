"""Whole weights for whoever looks at them between two steps.

With sharded weights a rank holds old values of other replicas' shares from the optimizer's update
until the next step's forwards. Lightning runs other people's hooks in between, so this callback
stands before all others and makes the weights whole first. At the end of a batch, where that would
put the gather into the open at every step, it does so only for callbacks and modules that may read
weights there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

_BETWEEN = ("on_train_batch_end", "on_train_batch_start")


class WholeWeights(pl.Callback):
    """Completes the weights before other hooks.

    Args:
        complete: Makes them whole; collective, and of no cost if they are.
    """

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete = complete
        self._each_batch = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds out who looks at weights between batches."""
        readers = weight_readers(trainer, pl_module)
        self._each_batch = bool(readers)
        if readers:
            rank_zero_warn(
                f"overlap=zero1: {', '.join(readers)} may look at weights after each batch, so "
                "they are gathered before that instead of under the next step. Where no weight is "
                "read, say so with a class attribute reads_weights = False."
            )

    def on_train_batch_end(self, *_: Any) -> None:
        """Before others' hooks."""
        if self._each_batch:
            self._complete()

    def _now(self, *_: Any, **__: Any) -> None:
        self._complete()

    on_train_epoch_start = on_train_epoch_end = on_train_end = _now
    on_sanity_check_start = on_validation_start = _now


def weight_readers(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Names of callbacks and modules whose hooks between two batches may read weights.

    Lightning's own do not, those of others unless they say ``reads_weights = False``.
    """
    found = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        known = type(callback).__module__.startswith("lightning.") or isinstance(
            callback, WholeWeights
        )
        looks = any(is_overridden(hook, callback, pl.Callback) for hook in _BETWEEN)
        if looks and not known and getattr(callback, "reads_weights", True):
            found.append(type(callback).__name__)
    if any(is_overridden(hook, module) for hook in _BETWEEN) and getattr(
        module, "reads_weights", True
    ):
        found.append(type(module).__name__)
    return found
