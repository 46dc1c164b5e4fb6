"""The module's state where hooks look at it, and the log calls of steps where Lightning looks.

Hooks run on every rank, steps leave their traces on the last stage's. So this callback stands
before all others and brings these traces to all ranks of a pipeline: at the end of an epoch, and
after each batch where a hook between batches is overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ThroughputMonitor
from torchmetrics import Metric

from strategies.errors import DataError
from strategies.models.logs import Replicas, share_metrics
from strategies.models.stage_model import LogCall, Mode
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.lightning.agreement.epoch_ends import EpochEnds
from strategies.runtime.lightning.hooks.epoch_metrics import (
    EPOCH,
    STEP,
    evaluates,
    join_epoch,
    store_locally,
)
from strategies.runtime.lightning.hooks.overridden_hooks import OverriddenHooks

ALIKE: Any = object()
"""A ``sync_dist_group``: all ranks have the same value already."""


def count_replicas(callbacks: Iterable[pl.Callback], *, replicas: int, size: int) -> None:
    """ThroughputMonitor takes each process for one that has samples of its own: replicas have.

    Args:
        callbacks: The Trainer's, after their setup.
        replicas: Of the module.
        size: Processes of a replica, which is one device to the callback.
    """
    for callback in callbacks:
        if isinstance(callback, ThroughputMonitor):
            peak = callback.available_flops
            for throughput in callback._throughputs.values():
                throughput.world_size = replicas
                throughput.available_flops = None if peak is None else peak * size


class HookState(pl.Callback):
    """Mirrors what steps have left before hooks look at it; of no cost where they left nothing."""

    def __init__(
        self,
        engine: Callable[[], Engine],
        overridden: Callable[[], OverriddenHooks],
        ends: EpochEnds,
    ) -> None:
        self._engine = engine
        self._overridden = overridden
        self._epoch_ends = ends

    def _begins(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Before the first batch: which hooks look, and with whom metrics are computed."""
        engine = self._engine()
        overridden = self._overridden()
        engine.mirrored = frozenset(overridden.reads)
        engine.whole.carried = frozenset(overridden.carries)
        where = engine.coordinates
        if engine.whole.replicas.group is None:
            replicas = engine.communicators.get("metrics", where.replicas((where.pp_rank,)))
            engine.whole.replicas = Replicas(replicas)
        if not trainer.training and where.dp > 1:
            now: Mode = (
                "test" if trainer.testing else "predict" if trainer.predicting else "validate"
            )
            engine.whole.together.discard(now)
            if _as_many_batches(trainer, engine):
                engine.whole.together.add(now)
            elif where.exchanges_across:
                raise DataError(
                    f"{now} with ep={where.ep} over dp={where.dp} replicas: they do not have as "
                    "many batches each (or nobody knows how many), and replicas that exchange "
                    "tokens have to run every batch together. Use a data set that dp times "
                    "batch_size divides, drop_last=True, or ep=1."
                )
        if where.dp > 1 and evaluates(trainer):
            store_locally(trainer._active_loop, engine.whole.replicas)
        engine.whole.state.forget_modules()
        share_metrics(pl_module, engine.whole.replicas)

    def _ends(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine = self._engine()
        self._epoch_ends.end(trainer)
        engine.mirror.share()
        if not trainer.predicting and engine.coordinates.dp > 1:
            join_epoch(trainer, pl_module, engine.whole.replicas)

    on_fit_start = on_train_epoch_start = on_validation_epoch_start = _begins
    on_test_epoch_start = on_predict_epoch_start = _begins
    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _ends


def repeat_logs(
    module: pl.LightningModule, calls: Iterable[LogCall], *, rows: int, alike: bool
) -> None:
    """Logs on this rank what the step has logged.

    Args:
        module: The module, inside the hook of its step.
        calls: One per name.
        rows: Of the batch, for Lightning's means over an epoch.
        alike: Whether all replicas have the same values; else ``join_epoch`` joins an epoch's.
    """
    for call in calls:
        options: dict[str, Any] = {"batch_size": rows, **call.options}
        if call.metric is not None:
            metric: Any = module.get_submodule(call.metric)
            assert isinstance(metric, Metric)
            value = call.value
            cache: Any = None if value is None else torch.tensor(value, dtype=torch.float64)
            metric._forward_cache = cache
            module.log(call.name, metric, **options)
            continue
        if alike:
            options |= {"sync_dist": True, "sync_dist_group": ALIKE}
        elif options.get("sync_dist_group") is None:
            each = STEP if options.get("sync_dist") else EPOCH
            options |= {"sync_dist": True, "sync_dist_group": each}
        module.log(call.name, torch.tensor(call.value, dtype=torch.float64), **options)


def _as_many_batches(trainer: pl.Trainer, engine: Engine) -> bool:
    """Whether all replicas evaluate as many batches, so that none waits for another in vain."""
    loop: Any = trainer._active_loop
    counts = loop.max_batches
    number = float(sum(counts) if isinstance(counts, list) else counts)
    everybody = tuple(range(engine.coordinates.world_size))
    bounds = torch.tensor([number, -number], dtype=torch.float64)
    group = engine.communicators.get("control", everybody)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    return isfinite(number) and float(bounds[0]) == -float(bounds[1])
