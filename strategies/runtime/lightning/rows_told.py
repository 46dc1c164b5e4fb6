"""What of a module sees rows of a microbatch where its author has thought of a batch.

That is said once, when it is known: of layers at the first batch, of the loss behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec

from strategies.runtime.step.microbatch import row_lists, share_sizes

_SHOWN = 5


class RowsTold:
    """Says what of a module sees a microbatch where its author has thought of a batch."""

    def __init__(self, module: pl.LightningModule) -> None:
        """Of a module that is still whole."""
        self._module = module
        self._norms = [n for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
        self._hooked = [n for n, p in module.named_parameters() if p._backward_hooks]
        self._elsewhere: list[str] = []
        self._hooks_told = self._layers_told = self._loss_told = self._mixed_told = False
        self._logs_told = self._lost_told = self._gathered_told = False
        self._kept_told = self._batch_told = self._lists_told = False
        self._lists: dict[str, Sequence[Any]] | None = None  # of the batch before
        self._passes = 0
        self._kept: list[tuple[nn.Module, str, str, Tensor, int]] = []

    def hooks(self, rows: int, num_microbatches: int) -> str | None:
        """Of parameters, at a batch of so many rows."""
        first = share_sizes(rows, num_microbatches)[0]
        if self._hooks_told or not self._hooked or first == rows:
            return None
        self._hooks_told = True
        return (
            f"{self._hooked[0]} has a hook (register_hook), which sees the gradient of each "
            f"microbatch of {first} rows, not that of the {rows} of a batch: a factor comes to the "
            "same, a limit does not. on_before_optimizer_step sees the batch's gradient."
        )

    def lists(
        self, batch: Any, batch_idx: int, loaders: TreeSpec | None, num_microbatches: int
    ) -> str | None:
        """Of lists as long as the batch that are the same in two batches of an epoch."""
        if self._lists_told or num_microbatches == 1:
            return None
        before, self._lists = self._lists, row_lists(batch, loaders)
        if before is None or batch_idx == 0:  # An epoch of one batch repeats all of it.
            return None
        self._lists_told = True
        same = [place for place, value in self._lists.items() if before.get(place) == value]
        if not same:
            return None
        others = f" and {len(same) - 1} more" if len(same) > 1 else ""
        return (
            f"{same[0]}{others} has the same {len(self._lists[same[0]])} entries in two batches, "
            "as many as the batch has rows: a microbatch gets those of its rows. If it is no list "
            "of rows (names of classes), keep it on the module, or as a dict in the batch."
        )

    def stages(self, owned: Collection[str]) -> None:
        """Once the module is cut: which parameters are on this rank."""
        self._elsewhere = [name for name in self._hooked if name not in owned]

    def later(self, hooked: Mapping[str, bool]) -> None:
        """Which parameters have hooks by now, and whether they are on this rank."""
        new = [name for name in hooked if name not in self._hooked]
        self._hooked += new
        self._elsewhere += [name for name in new if not hooked[name]]

    def elsewhere(self) -> str | None:
        """Of hooks of parameters that this rank will not call."""
        names, self._elsewhere = self._elsewhere, []
        if not names:
            return None
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (
            f"hooks of parameters (register_hook, WandbLogger.watch) are called on the rank of "
            f"their stage: not on rank 0 those of {', '.join(names[:_SHOWN])}{more}. "
            "on_before_optimizer_step has the gradients of all parameters on every rank."
        )

    def layers(self, rows: int, num_microbatches: int) -> str | None:
        """At a batch of so many rows; None where there is nothing to say (again)."""
        if self._layers_told:
            return None
        self._layers_told = True
        found = dict(self._module.named_modules())
        norms = [n for n in self._norms if getattr(found.get(n), "training", True)]
        first = share_sizes(rows, num_microbatches)[0]
        if not norms or first == rows:
            return None
        others = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
        return (
            f"{norms[0]}{others}: BatchNorm takes its mean and variance over {first} rows of a "
            f"microbatch, not over the {rows} of a batch. Larger microbatches come closer to stock "
            "Lightning (num_microbatches); GroupNorm and LayerNorm know no rows. SyncBatchNorm "
            "spans replicas, not microbatches, and loss_over=batch concerns the loss alone."
        )

    def before(self, layers: Iterable[nn.Module]) -> None:
        """Before a training pass; what is made in the first one (a cache) is not looked at."""
        self._passes += 1
        if self._passes != 2:
            return
        inside = {id(child) for layer in layers for child in layer.modules()}
        self._kept = [
            (child, name, key, buffer, buffer._version)
            for name, child in self._module.named_modules()
            if id(child) in inside and not isinstance(child, _BatchNorm)
            for key, buffer in child._buffers.items()
            if buffer is not None and not buffer.is_meta and not buffer.is_inference()
        ]

    def buffers(self, num_microbatches: int) -> str | None:
        """Behind a training pass, of what layers keep from forward to forward."""
        kept, self._kept = self._kept, []
        changed = [
            f"{name}.{key}"
            for child, name, key, before, version in kept
            if (now := child._buffers.get(key)) is not None
            and (now is not before or now._version != version)
        ]
        if not changed or num_microbatches == 1:
            return None
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return (
            f"{changed[0]}{others}: layers change these buffers in their forwards, of which a "
            f"pipeline runs {num_microbatches} per batch, on the rows of a microbatch each. "
            "Running means, counters and power iterations (spectral_norm) move on as often. Fewer "
            "and larger microbatches come closer to stock Lightning; count batches in hooks."
        )

    def lost(self, stages: Collection[int]) -> str | None:
        """Of stages that have lost a gradient of what the stages before them gave."""
        if self._lost_told or not stages:
            return None
        self._lost_told = True
        stage = min(stages)
        return (
            f"stage {stage} has no gradient any more for a value of the stages before it: "
            f"{type(self._module).__name__}.training_step detaches it there, or makes no use of it "
            "in the loss, in some microbatches alone. A pipeline sends zeros back for these, and a "
            "step without any other gradient updates weights before the cut with them: weight "
            "decay and momentum go on, where stock Lightning leaves weights without a gradient as "
            "they are. Freeze them (requires_grad_(False)) for as long, or use pp=1."
        )

    def mixed(self, line: str | None) -> str | None:
        """Of a line with a layer that gets rows which others of the batch have a part in."""
        if self._mixed_told or line is None:
            return None
        self._mixed_told = True
        return (
            f"{line}: {type(self._module).__name__}.training_step mixes rows of the batch between "
            "its layers: what this layer gets for a row depends on others, and a pipeline mixes "
            "the rows of each microbatch. Mix what goes into the first layer (that is done for the "
            "whole batch), or use num_microbatches=1."
        )

    def logs(self, names: Sequence[str]) -> str | None:
        """Of numbers that are logged before the last layer, and are no means over rows."""
        if self._logs_told or not names:
            return None
        self._logs_told = True
        return (
            f"{type(self._module).__name__}.training_step logs {', '.join(names)} before its last "
            "layer, where no stage has the whole batch, and no mean over rows: the number that is "
            "logged is the mean of the microbatches'. Log it behind the last layer (there it is "
            "that of the batch), or use num_microbatches=1."
        )

    def by_hand(self, names: Sequence[str], returned: Sequence[str]) -> str | None:
        """Of manual optimization: what is logged and no mean over rows, and returned for hooks."""
        if self._logs_told or not (names or returned):
            return None
        self._logs_told = True
        step = f"{type(self._module).__name__}.training_step"
        told = []
        if names:
            told.append(
                f"{step} logs {', '.join(names)}, no mean over rows: with manual optimization the "
                "number that is logged is the mean of the microbatches'. num_microbatches=1 gives "
                "that of the batch."
            )
        if returned:
            told.append(
                f"{step} returns {', '.join(returned)}: with manual optimization "
                "on_train_batch_end gets the loss alone. Log it."
            )
        return " ".join(told)

    def gathered(self, line: str | None) -> str | None:
        """Of a line before the last layer that makes one number of all rows, for the loss."""
        if self._gathered_told or line is None:
            return None
        self._gathered_told = True
        return (
            f"{line}: {type(self._module).__name__}.training_step makes a number of all rows "
            "before its last layer (a load balance, a decorrelation), which is no mean over rows, "
            "and the loss takes it: a pipeline trains the mean of the microbatches' numbers. Fewer "
            "and larger microbatches come closer to stock Lightning. Made behind the last layer, "
            "with loss_over=batch, it is that of the batch."
        )

    def kept(self, line: str | None) -> str | None:
        """Of a line before the last layer whose value a step keeps, and which is of no row."""
        if self._kept_told or line is None:
            return None
        self._kept_told = True
        return (
            f"{line}: {type(self._module).__name__}.training_step keeps or returns a value from "
            "before its last layer that is made of several rows, or of one: of a batch it is the "
            "mean of the microbatches' values. Keep what has a row for each of the batch's, make "
            "it behind the last layer, or use num_microbatches=1."
        )

    def batch(self, changes: bool) -> str | None:
        """Of a step that writes into its batch, if hooks get that."""
        if self._batch_told or not changes:
            return None
        self._batch_told = True
        return (
            f"{type(self._module).__name__}.training_step changes its batch, and "
            "on_train_batch_end gets it as it came: each stage and microbatch has a copy. Return "
            "what hooks need (they get it as outputs), or keep it on the module."
        )

    def loss(self, unlike: tuple[float, float] | None) -> str | None:
        """Behind a batch, of its loss as it is trained and of all rows at once, if they differ."""
        if self._loss_told or unlike is None:
            return None
        self._loss_told = True
        return (
            f"the loss of {type(self._module).__name__}.training_step depends on how rows are "
            f"grouped: the mean of its microbatches' losses is {unlike[0]:.6g}, the loss of the "
            f"whole first batch {unlike[1]:.6g}. It compares rows with each other, or is no plain "
            "mean over rows. With loss_over=batch it is that of stock Lightning; for a mean over "
            "tokens, loss_over=tokens is enough."
        )
