"""What happens to weights when a step ends: clipping, the watch for NaN, the update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import NotFiniteError, RunError
from strategies.heartbeat import Heartbeat
from strategies.plan import Options, Plan
from strategies.runtime.lightning.checkpoints.checkpointing_strategy import CheckpointingStrategy
from strategies.runtime.lightning.hooks.hook_watch import OwnBackward
from strategies.runtime.lightning.hooks.overridden_hooks import (
    OverriddenHooks,
    gradient_hooks,
    weight_readers,
)
from strategies.runtime.lightning.manual_optimization import ManualOptimization, UncutByHand
from strategies.runtime.lightning.refusals import SharedGradScaler
from strategies.runtime.lightning.stream_loop import StreamLoop
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.update.grad_sync import clip_
from strategies.runtime.update.main_optimizer import (
    ELEMENTWISE,
    with_sparse_gradients,
)
from strategies.runtime.update.nan_guard import Finding, NotFiniteStep, first_finding

# --------------------------------------------------------------------------------------------------
# Whether a training may update before the verdict on its step is in, and who must wait for it.
#
# Everything that looks at weights between two steps would see an update that may still be undone.
# So either nothing does, as far as anybody can know, or ranks wait at the flush as they always
# have. What runs at the ends of epochs, before a validation and before a checkpoint waits for the
# verdict first.

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
    """Why updates wait for their verdict on this rank; empty where they need not."""
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
    changers = gradient_hooks(trainer, module)
    if changers:
        return f"{', '.join(changers)} may change gradients before the update"
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


# --------------------------------------------------------------------------------------------------
_log = logging.getLogger(__name__)


class UpdatingStrategy(CheckpointingStrategy):
    """Lightning's hooks from a step's backward to its update."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        metadata: Mapping[str, Any] | None,
        heartbeat: Heartbeat | None,
    ) -> None:
        super().__init__(plan, options, metadata=metadata, heartbeat=heartbeat)
        self.skipped_steps: list[int] = []  # optimizer steps, as of Trainer.global_step before them
        self._accumulating = False
        self._manual: ManualOptimization | UncutByHand | None = None
        self._loop: StreamLoop | None = None  # of a schedule without a flush
        self._last_norm: Tensor | None = None
        self._late = False  # whether updates are made before their verdict
        self._unchanged = False  # whether gradients are clipped as the flush has left them
        self._left_by_hooks: list[Finding] = []  # of gradients, on all ranks
        self._own_backward: OwnBackward | None = None
        self._overridden = OverriddenHooks()

    def _away(self) -> AbstractContextManager[None]:
        """Around the pipeline's own work, which people's hooks may have called."""
        return nullcontext() if self._hooks is None else self._hooks.away()

    def _goes_on_late(self, trainer: pl.Trainer) -> bool:
        """Whether updates are made before their verdict; the same on all ranks."""
        asked, module = self._options.post_validation, self.lightning_module
        if asked is False or self.engine.alone or self._scaler is not None:
            return False
        if self.engine.stream is not None:
            return False  # Nobody waits for a flush that there is none of.
        if self._options.ep > 1:
            return False  # Experts' tokens travel inside the forwards that would be thrown away.
        assert module is not None
        if not (self._looks or trainer.gradient_clip_val):
            return False  # Nobody waits for anything.
        if len(self.optimizers) != 1:
            return False
        own = why_it_waits(trainer, module, self.optimizers[0])
        why_not = next(filter(None, everybody().everyone(own)), "")
        if asked is True and why_not:
            rank_zero_warn(f"post_validation=true: ranks wait at the flush, because {why_not}.")
        return not why_not and (asked is True or self.engine.gains_at_flush)

    def _asks_early(self) -> bool:
        """Whether, without a flush, ranks agree on an update while they run later microbatches."""
        if self.engine.stream is None or not (self._looks or self._clips_by_norm):
            return False
        together = self._plan.schedule != "pipedream" or self._plan.vertical_sync
        return together and not self._overridden.clipped

    def _leaves_gradients(self) -> bool:
        """Whether nothing changes gradients between the flush and the clipping."""
        hooked = self.looks_after_backward or self._overridden.clipped
        return not hooked and self._scaler is None

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.precision_plugin, "scaler", None)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backwards have run already; what is left is their gradients and Lightning's hooks.

        But for a step by hand that runs whole.
        """
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if isinstance(self._manual, UncutByHand):
            self._manual.backward(closure_loss, *args, **kwargs)
        else:
            if self._own_backward is not None:
                self._own_backward.call(closure_loss)
            self.engine.restore_gradients()
            if self.looks_after_backward and not self._accumulating:
                self.engine.flush()  # They may read gradients, which are still being reduced.
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @property
    def looks_after_backward(self) -> bool:
        """Whether a hook of some rank may read gradients behind a backward."""
        return bool(self._overridden.backward)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Around all but the last batch of an accumulation: the program without REDUCE and STEP."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The flush: this rank's reductions end, then its stages are updated."""
        if self._loop is None or self._loop.alone:
            return self._apply_update(optimizer, closure, model, **kwargs)
        return self._loop.step(optimizer, closure, self._apply_update)

    def _apply_update(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        result: Any = None

        def flushed() -> Any:
            nonlocal result
            result = closure()
            self._last_norm = None
            if self._manual is not None:
                self.engine.settle()
            self.engine.flush()
            if self._looks and not self._clips_by_norm:
                self._find_not_finite(optimizer)
            shown.callback(with_sparse_gradients(optimizer))
            return result

        try:
            with self._away(), ExitStack() as shown:
                output = super().optimizer_step(optimizer, flushed, model, **kwargs)
        except NotFiniteStep:
            self._updating = False
            if self._left_by_hooks and self._scaler is not None:
                self._scaler.update()  # It has looked at this step's gradients already.
            self._leave_out()
            return result
        scaler = self._scaler
        if self._looks and isinstance(scaler, SharedGradScaler) and scaler.exhausted:
            self._leave_out()  # The scaler's own all-reduce has told all ranks.
            self._updating = False
            return output
        self.engine.stepped()
        self._updates, self._updating = self._updates + 1, False
        return output

    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        """Lightning's hooks between backward and update, and a look at what they have left."""
        plugin: Any = self.precision_plugin
        type(plugin)._after_closure(plugin, model, optimizer)
        self._look_behind_hooks(optimizer)
        self._updating = True

    def _look_behind_hooks(self, optimizer: Any) -> None:
        if not self._looks or self._late or not self._overridden.gradients:
            return
        scaler = self._scaler
        if isinstance(scaler, SharedGradScaler) and bool(scaler.overflowed):
            return  # It leaves the step out by itself.
        counted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = everybody().everyone(self.engine.left_by_hooks(counted))
        if not all(isinstance(findings, list) for findings in found):
            raise RunError("another rank has left this step by an error, and it was not applied.")
        self._left_by_hooks = [finding for findings in found for finding in findings]
        if self._left_by_hooks:
            raise NotFiniteStep

    def _find_not_finite(self, optimizer: Optimizer) -> None:
        engine = self.engine
        if self._late and engine.may_go_on:
            engine.go_on(optimizer, limit=None, step=int(self._trainer.global_step))
            return
        struck = engine.leaves_out()
        engine.late.waited(struck=struck)
        if struck:
            raise NotFiniteStep

    @property
    def _looks(self) -> bool:
        """Whether a step that is not finite is to be found."""
        return self._options.on_nan != "ignore"

    @property
    def _clips_by_norm(self) -> bool:
        """Whether the norm's all-reduce will tell all ranks that a step is to be left out."""
        trainer: Any = self._trainer
        return (
            bool(trainer.gradient_clip_val)
            and trainer.gradient_clip_algorithm in (None, "norm")
            and self._scaler is None
            and not is_overridden("configure_gradient_clipping", self.lightning_module)
        )

    def _leave_out(self) -> None:
        """All ranks are here, and none has updated; collective."""
        found, self._left_by_hooks = self._left_by_hooks, []
        found = found or self.engine.findings()
        self._tell_not_finite(found, int(self._trainer.global_step))
        self.engine.left_out()

    def _leave_out_late(self, step: int) -> None:
        """The same when the next step has begun: the update of ``step`` has been undone."""
        findings = self.engine.late_findings()
        progress = self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        done = progress.optimizer.step
        try:
            self._tell_not_finite(findings, step)
        except NotFiniteError:
            done.total.completed -= 1  # Whoever looks at the step now sees the one that it is.
            done.current.completed -= 1
            raise

    def _tell_not_finite(self, own: list[Finding], step: int) -> None:
        """Names the cause on all ranks; collective.

        Raises:
            NotFiniteError: With ``on_nan="stop"``, or where no later step would be finite.
        """
        gathered: list[list[Finding]] = everybody().everyone(own)
        cause = first_finding(item for items in gathered for item in items).sentence()
        message = f"step {step + 1}: {cause}. No rank has applied this step."
        if self._options.on_nan == "stop":
            raise NotFiniteError(f"{message} {self._last_checkpoint()}")
        lasting = self._not_finite()
        if lasting is not None:
            raise NotFiniteError(
                f"{message} To skip it cannot help: {lasting}, and stays so. "
                f"{self._last_checkpoint(skips=False)}"
            )
        self.skipped_steps.append(step)
        if self.is_global_zero:
            _log.warning("%s %d skipped so far.", message, len(self.skipped_steps))

    def gradient_norm(self) -> Tensor:
        """2-norm of the whole model's gradient; collective, once per step however often asked."""
        if self._last_norm is None:
            with self._away():
                self._last_norm = self.engine.gradient_norm()
        return self._last_norm

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        if self._manual is not None:
            with self._away():
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                self.engine.clip_some_by_norm(parameters, float(clip_val))
            return
        with self._away():
            late = self.engine.late
            if self._late and self._clips_by_norm and self.engine.may_go_on:
                step = int(self._trainer.global_step)
                self.engine.go_on(
                    optimizer, limit=float(clip_val), step=step, unchanged=self._unchanged
                )
                return
            if self._last_norm is None and self._unchanged:
                self._last_norm = self.engine.gradient_norm(unchanged=True)
            norm = self.gradient_norm()
            late.waited(struck=not bool(norm <= float(clip_val)))
            if self._looks and self._clips_by_norm and not bool(torch.isfinite(norm)):
                raise NotFiniteStep  # All ranks have the same norm.
            clip_(self.engine.updated_parameters(), norm, float(clip_val))
