"""The module's state where hooks look at it, and the log calls of steps where Lightning looks.

Hooks run on every rank, steps leave their traces on the last stage's. So this callback stands
before all others and brings these traces to all ranks of a pipeline: at the end of an epoch, and
after each batch where a hook between batches is overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from math import isfinite, isinf
from typing import Any
from weakref import finalize

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ThroughputMonitor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric

from strategies.errors import DataError
from strategies.models.logs import Replicas, share_metrics
from strategies.models.nested import replaced
from strategies.models.stage_model import LogCall, Mode
from strategies.runtime.engine.rank_engine import Engine
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
        self, engine: Callable[[], Engine], overridden: Callable[[], OverriddenHooks]
    ) -> None:
        self._engine = engine
        self._overridden = overridden

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
        engine.whole.state.forget()
        share_metrics(pl_module, engine.whole.replicas)

    def _ends(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine = self._engine()
        if trainer.training and engine.coordinates.dp > 1:
            _refuse_no_batch(trainer, engine)
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


def epoch_ends(trainer: pl.Trainer, *, ahead: bool) -> tuple[int | None, bool]:
    """How many training batches the epoch has, None if nobody knows, and whether this is the last.

    Asked inside a training step. The step that ends the training ends the epoch, too.

    Args:
        trainer: It trains.
        ahead: Whether to fetch the next batch where a loader's length is a promise only.
    """
    loop = trainer.fit_loop.epoch_loop
    steps = trainer.global_step + (not loop._should_accumulate())
    loaders: Any = trainer.fit_loop._combined_loader
    promised = not all(map(_is_measured, loaders.flattened))
    if (
        loop._num_ready_batches_reached()
        or 0 < loop.max_steps <= steps
        or (promised and ahead and _nothing_follows(trainer.fit_loop._data_fetcher))
    ):
        return int(loop.batch_progress.current.ready), True
    known = trainer.num_training_batches
    return (int(known) if isfinite(known) and not promised else None), False


def _is_measured(loader: Any) -> bool:
    """Whether a loader's length is that of its data; else it is a promise of the user's code."""
    own = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    samplers = (loader.sampler, loader.batch_sampler) if own else ()
    return own and all(type(each).__module__.startswith(_KNOWN) for each in samplers)


_KNOWN = ("torch.", "lightning.", "strategies.", "builtins")


def _nothing_follows(fetcher: Any) -> bool:
    """Whether this batch is the last one; fetches the next one for that, which Lightning gets."""
    if fetcher.length is None:
        return bool(fetcher.done)
    if not isinstance(fetcher.iterator, _Ahead):
        fetcher.iterator = _Ahead(fetcher.iterator, fetcher.combined_loader.flattened)
    return fetcher.iterator.nothing_follows


class _Ahead:
    """An iterator that knows whether something follows.

    Loaders with a state keep the one from before the batch that is fetched ahead, as long as the
    loop has not got that: a run that resumes from it begins with this batch.
    """

    def __init__(self, iterator: Iterator[Any], loaders: Sequence[Any]) -> None:
        self._iterator = iterator
        self._stateful = [loader for loader in loaders if hasattr(loader, "state_dict")]
        self._kept = ExitStack()
        finalize(self, self._kept.close)  # An epoch may end before the batch.
        self._next: list[Any] = []
        self._ended = False

    @property
    def nothing_follows(self) -> bool:
        if not self._next and not self._ended:
            states = [(vars(each), deepcopy(each.state_dict())) for each in self._stateful]
            kept = [(own, "state_dict", partial(deepcopy, state)) for own, state in states]
            self._kept.enter_context(replaced(kept))
            try:
                self._next.append(next(self._iterator))
            except StopIteration:
                self._ended = True
        return self._ended

    def __next__(self) -> Any:
        self._kept.close()
        if self._ended:
            raise StopIteration
        return self._next.pop() if self._next else next(self._iterator)


def _refuse_no_batch(trainer: pl.Trainer, engine: Engine) -> None:
    """Of a replica whose loader is empty, while others may wait for it in their first step."""
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_progress.current.ready or trainer.should_stop or loop._is_training_done:
        return
    raise DataError(
        f"replica {engine.coordinates.dp_rank} has 0 training batches in this epoch, and every "
        "step adds up the gradients of all replicas. Give all of them the same number (let the "
        "data set be divided by trainer.distributed_sampler_kwargs)."
    )


def ends_loader(trainer: pl.Trainer, loader: Sequence[int]) -> bool:
    """Whether this evaluation batch is the last of its loader, or may be."""
    loop: Any = trainer._active_loop
    progress = loop.batch_progress
    if progress.is_last_batch:
        return True
    counts = loop.max_batches
    if not isinstance(counts, list) or len(counts) < 2:
        return False
    through = sum(counts[: (loader[0] if loader else 0) + 1])
    return bool(isinf(through) or progress.current.ready >= through)
