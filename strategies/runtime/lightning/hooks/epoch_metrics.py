"""What evaluation steps have logged on one replica, joined over replicas at the epoch's end.

Replicas may log other names, in another order, for another number of batches. So their values are
joined by name, in one exchange when the epoch ends: a name that a replica has not logged weighs
nothing there, and all replicas have all names afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import Metric

from strategies.errors import ModelError
from strategies.models.logs import Replicas
from strategies.runtime.messages.exchange import Exchange

EPOCH: Any = object()
"""A ``sync_dist_group``: a batch's value is the replica's; ``join_epoch`` joins the epoch's."""
STEP: Any = object()
"""As ``EPOCH``, but replicas that have as many batches reduce each batch's value, too."""

_KEPT = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")


def evaluates(trainer: pl.Trainer) -> bool:
    return trainer.validating or trainer.testing or trainer.sanity_checking


def join_epoch(trainer: pl.Trainer, module: pl.LightningModule, replicas: Replicas) -> None:
    """Gives each replica the epoch's values of all of them; collective, between steps.

    Means are weighed by their numbers of samples. torchmetrics objects that any replica has logged
    are computed by all, in the order of their places in the module.

    Raises:
        ModelError: Replicas log a name in two ways: with other options, or as an object here and
            as a number there.
    """
    loop: Any = trainer._active_loop
    results: Any = loop._results
    vars(loop).pop("_store_dataloader_outputs", None)
    own = {key: _entry(metric) for key, metric in _of_steps(results)}
    everyone: list[dict[str, Any]] = Exchange(replicas.group).everyone(own)
    metrics = {}
    for key in sorted(set().union(*everyone)):
        entries = {n: replica[key] for n, replica in enumerate(everyone) if key in replica}
        _refuse_two_ways(entries)
        entry = next(iter(entries.values()))
        if entry["metric"] is not None:
            metrics[key] = entry
            continue
        if key not in own:
            _log(trainer, results, entry, torch.zeros((), dtype=torch.float64))
        _put(results[key], list(entries.values()))
    for key, entry in sorted(metrics.items(), key=lambda item: str(item[1]["metric"])):
        metric: Any = module.get_submodule(entry["metric"])
        assert isinstance(metric, Metric)
        if key not in own:
            _log(trainer, results, entry, metric)
        metric._computed = None
        results[key]._computed = None
        with warnings.catch_warnings():
            if key not in own:  # Other replicas have updated it.
                warnings.filterwarnings("ignore", ".*was called before the ``update`` method")
            results[key].compute()
    if evaluates(trainer) and not trainer.sanity_checking:
        _show(trainer, loop, results)


def store_locally(loop: Any, replicas: Replicas) -> None:
    """Lets Lightning store a loader's values at its end without waiting for other replicas.

    They may have no batch of that loader; ``join_epoch`` brings the values together.
    """
    stock = type(loop)._store_dataloader_outputs

    def store() -> None:
        replicas.silent = True
        try:
            stock(loop)
        finally:
            replicas.silent = False

    loop._store_dataloader_outputs = store


def _of_steps(results: Any) -> Iterator[tuple[str, Any]]:
    """What steps have logged for the epoch; what hooks log is theirs to bring together."""
    for key, metric in results.items():
        sync = metric.meta.sync
        ours = sync.group in (EPOCH, STEP) or not metric.is_tensor
        if ours and not metric.has_reset and metric.meta.on_epoch:
            yield key, metric


def _entry(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    entry = {name: getattr(meta, name) for name in _KEPT}
    entry |= {
        "fx": meta.fx.partition(".")[0],
        "name": meta.name,
        "loader": meta.dataloader_idx,
        "how": meta.reduce_fx.__name__,
        "metric": None if metric.is_tensor else meta.metric_attribute,
    }
    if metric.is_tensor:
        entry["value"] = float(metric.value)
        entry["weight"] = float(metric.cumulated_batch_size) if meta.is_mean_reduction else 1.0
    return entry


def _refuse_two_ways(entries: Mapping[int, Mapping[str, Any]]) -> None:
    """All replicas have the same entries, so all of them raise."""
    (first, one), *others = entries.items()
    for replica, other in others:
        for option in (*_KEPT, "how", "metric"):
            if one[option] == other[option]:
                continue
            raise ModelError(
                f"self.log({one['name']!r}) in {one['fx']}: {_OPTIONS.get(option, option)} is "
                f"{one[option]} on replica {first} and {other[option]} on replica {replica}, so "
                "their values cannot be joined. Log it with the same options on all replicas."
            )


_OPTIONS = {"how": "reduce_fx", "metric": "the torchmetrics object"}


def _log(trainer: pl.Trainer, results: Any, entry: Mapping[str, Any], value: Any) -> None:
    """Makes the entry of a name that only other replicas have logged."""
    current, results.dataloader_idx = results.dataloader_idx, entry["loader"]
    try:
        results.log(
            entry["fx"], entry["name"], value, **{name: entry[name] for name in _KEPT},
            reduce_fx=entry["how"], sync_dist=True, sync_dist_fn=trainer.strategy.reduce,
            sync_dist_group=EPOCH, batch_size=1, metric_attribute=entry["metric"],
        )  # fmt: skip
    finally:
        results.dataloader_idx = current


def _put(metric: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    values = [entry["value"] for entry in entries]
    how = entries[0]["how"]
    joined = {"max": max, "min": min}.get(how, sum)(values)
    metric.value = torch.tensor(joined, dtype=metric.value.dtype, device=metric.value.device)
    if how == "mean":
        weight = sum(entry["weight"] for entry in entries)
        metric.cumulated_batch_size = metric.value.new_tensor(weight)
    metric._computed = None


def _show(trainer: pl.Trainer, loop: Any, results: Any) -> None:
    """Puts the joined values where Lightning has put this replica's own at each loader's end."""
    connector = trainer._logger_connector
    current = results.dataloader_idx
    count = len(loop.max_batches) if isinstance(loop.max_batches, list) else 1
    shown = []
    try:
        for loader in range(count) if count > 1 else [None]:
            results.dataloader_idx = loader
            found = results.metrics(on_step=False)
            connector._progress_bar_metrics.update(found["pbar"])
            connector._callback_metrics.update(found["callback"])
            connector._logged_metrics.update(found["log"])
            shown.append(found["log"])
    finally:
        results.dataloader_idx = current
    loop._logged_outputs = shown
