"""Which callbacks and modules override which hooks of Lightning, agreed over all ranks.

What ranks do together depends on it: a look at gradients behind hooks that may change them, updates
before their verdict, weights made whole after each batch. A callback that one rank alone has
(``callbacks=[Report()] if rank == 0 else []``) makes all ranks do the same all the same.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from strategies.models.stage_model import Mode
from strategies.runtime.lightning.refusals import is_weight_averaging
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.fingerprint import MismatchError, difference

_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
# Hooks between two batches that may read weights.
_BETWEEN = ("on_train_batch_end", "on_train_batch_start")
# Hooks between two batches that may read what steps have left.
_STATE: dict[Mode, tuple[str, ...]] = {
    "train": (
        "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward",
        "on_before_optimizer_step", "on_before_zero_grad", "optimizer_step", "lr_scheduler_step",
        "configure_gradient_clipping",
    ),
    "validate": ("on_validation_batch_start", "on_validation_batch_end"),
    "test": ("on_test_batch_start", "on_test_batch_end"),
    "predict": ("on_predict_batch_start", "on_predict_batch_end"),
}  # fmt: skip
# Callbacks of Lightning that save, stop or change a training, which all ranks do together.
_DECIDING = (
    Checkpoint, EarlyStopping, Timer, GradientAccumulationScheduler, BaseFinetuning,
    StochasticWeightAveraging, ModelPruning,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OverriddenHooks:
    """On any rank; names of callbacks and modules, in the order of ranks.

    Attributes:
        backward: Who may read gradients behind a backward.
        gradients: Who may change them between the flush and the update.
        clipped: Who may change them before they are clipped, and reads weights.
        weights: Who may read weights between two batches.
        reads: Modes in which hooks between two batches may read what steps have left.
        carries: Modes in which hooks behind a batch get what its step has returned.
        saves: Which callbacks write checkpoints.
    """

    backward: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    clipped: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    reads: list[Mode] = field(default_factory=list)
    carries: list[Mode] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)

    @staticmethod
    def agreed(trainer: pl.Trainer, module: pl.LightningModule) -> OverriddenHooks:
        """Of all ranks together; collective.

        Raises:
            MismatchError: A callback that all ranks need is not the same on all of them.
        """
        exchange = everybody()
        own = {name: list(found) for name, found in _own(trainer, module).items()}
        told = exchange.everyone((exchange.rank, socket.gethostname(), _deciding(trainer), own))
        if trainer.state.fn == TrainerFn.FITTING:
            message = difference([each[:3] for each in told], "callbacks", partial=True)
            if message is not None:
                raise MismatchError(message)
        names: dict[str, Any] = {
            name: list(dict.fromkeys(found for *_, theirs in told for found in theirs[name]))
            for name in own
        }
        return OverriddenHooks(**names)


def _own(trainer: pl.Trainer, module: pl.LightningModule) -> Mapping[str, Sequence[str]]:
    """Of this rank, by the fields of ``OverriddenHooks``."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    others = [c for c in callbacks if type(c).__module__.partition(".")[0] not in _LIBRARIES]
    state = {
        mode: [hook for hook in hooks if _owners(hook, others, module)]
        for mode, hooks in _STATE.items()
    }
    return {
        "backward": _owners("on_after_backward", callbacks, module),
        "gradients": gradient_hooks(trainer, module),
        "clipped": clipped_hooks(trainer, module),
        "weights": weight_readers(trainer, module),
        "reads": [mode for mode, hooks in state.items() if hooks],
        "carries": [
            mode
            for mode, hooks in state.items()
            if mode != "predict" and any(hook.endswith("_batch_end") for hook in hooks)
        ],
        "saves": [type(callback).__name__ for callback in trainer.checkpoint_callbacks],
    }


_LIBRARIES = ("lightning", "strategies")


def _owners(hook: str, callbacks: Sequence[Any], module: pl.LightningModule) -> list[str]:
    """Names of those that override a hook."""
    known = callbacks if hasattr(pl.Callback, hook) else ()
    found = [type(c).__name__ for c in known if is_overridden(hook, c, pl.Callback)]
    return found + [type(module).__name__] * is_overridden(hook, module)


def gradient_hooks(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Callbacks and modules that may change gradients between flush and update, on this rank."""
    if not module.automatic_optimization:
        return [type(module).__name__]
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    found = [
        type(callback).__name__
        for callback in callbacks
        if type(callback).__module__.partition(".")[0] not in ("strategies", "launcher")
        and any(is_overridden(hook, callback, pl.Callback) for hook in _GRADIENTS)
    ]
    own = (*_GRADIENTS, "configure_gradient_clipping", "optimizer_step")
    if any(is_overridden(hook, module) for hook in own):
        found.append(type(module).__name__)
    return found


def clipped_hooks(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Names of those that may change gradients between a backward and their clipping."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    readers = [each for each in (*callbacks, module) if getattr(each, "reads_weights", True)]
    found = [
        type(each).__name__
        for each in readers
        if any(is_overridden(h, each, None if each is module else pl.Callback) for h in _GRADIENTS)
    ]
    own = is_overridden("configure_gradient_clipping", module)
    return [*found, type(module).__name__] if own else found


def weight_readers(
    trainer: pl.Trainer, module: pl.LightningModule, *, more: Sequence[str] = ()
) -> list[str]:
    """Names of callbacks and modules whose hooks between two batches may read weights.

    Lightning's own do not, those of others unless they say ``reads_weights = False``. ``more`` are
    further hooks that count.
    """
    hooks = (*_BETWEEN, *more)
    found = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        known = type(callback).__module__.partition(".")[0] in _LIBRARIES
        looks = any(is_overridden(hook, callback, pl.Callback) for hook in hooks)
        if looks and not known and getattr(callback, "reads_weights", True):
            found.append(type(callback).__name__)
    if any(is_overridden(hook, module) for hook in hooks) and getattr(
        module, "reads_weights", True
    ):
        found.append(type(module).__name__)
    return found


def _deciding(trainer: pl.Trainer) -> dict[str, str]:
    """Which callbacks all ranks need, and how each is set up."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = [
        callback
        for callback in callbacks
        if isinstance(callback, _DECIDING) or is_weight_averaging(callback)
    ]
    names = [type(callback).__name__ for callback in found]
    settings = {
        f"settings of {name} {names[:number].count(name)}": callback.state_key
        for number, (name, callback) in enumerate(zip(names, found, strict=True))
    }
    return {"callbacks that save, stop or change a training": ", ".join(names) or "none"} | settings
