"""torchmetrics objects of a module: who talks to whom when one of them is computed.

Left alone, they would gather over all processes, of which most are other stages: so the last
stage's rank would wait for ever. Here they gather over the replicas of their own pipeline rank,
and while a step runs on a microbatch over nobody.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from strategies.errors import ModelError
from strategies.models.collectives import LocalGroup
from strategies.models.contents import kind_of, walk
from strategies.models.nested import replaced

_TABLES = frozenset(nn.Module().__dict__)


class Replicas:
    """With whom this rank's metrics are computed together; one object, shared by all copies."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.silent = False

    def __call__(self) -> bool:
        """Whether there is anybody to gather from."""
        return self.group is not None and not self.silent

    def gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """All replicas' tensors, from host memory."""
        # Inside a step these replicas are the default group already.
        default = dist.group.WORLD
        inside = default is self.group or isinstance(default, LocalGroup)
        gathered = gather_all_tensors(tensor.detach().cpu(), group=None if inside else self.group)
        return [item.to(tensor.device) for item in gathered]

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicas, (None,)


def share_metrics(module: nn.Module, replicas: Replicas) -> bool:
    """Lets all metrics of a module gather over replicas; tells whether it has any.

    Raises:
        ModelError: A metric lies where neither torch nor Lightning look for modules.
    """
    found = [child for child in module.modules() if isinstance(child, Metric)]
    for metric in found:
        metric.distributed_available_fn = replicas
        metric.dist_sync_fn = replicas.gather
    registered = {id(child) for child in module.modules()}
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if key in _TABLES or kind_of(value) is None:
                continue
            inside = (
                item for item, _ in walk(value) if isinstance(item, Metric | MetricCollection)
            )
            if any(id(item) not in registered for item in inside):
                place = f"{name}.{key}" if name else key
                raise ModelError(
                    f"{place} is a plain {type(value).__name__} of torchmetrics objects, which are "
                    "no modules of the LightningModule then: their devices and states would be "
                    "those of one stage. Use nn.ModuleDict, nn.ModuleList or MetricCollection."
                )
    return bool(found)


@contextlib.contextmanager
def on_microbatch(module: nn.Module) -> Iterator[None]:
    """Inside, metrics talk to nobody, and have no opinion on batches of a few rows.

    A value that cannot be computed from a microbatch (R2 of one row) is not a number there; what
    counts is computed from the whole batch later.
    """
    entries: list[tuple[dict[str, Any], str, Any]] = []
    shared = set()
    for child in module.modules():
        if isinstance(child, Metric):
            if isinstance(child.distributed_available_fn, Replicas):
                shared.add(child.distributed_available_fn)
            for name in ("forward", "compute"):
                entries.append((child.__dict__, name, _tolerant(getattr(child, name))))
    for replicas in shared:
        replicas.silent = True
    try:
        with replaced(entries):
            yield
    finally:
        for replicas in shared:
            replicas.silent = False


@contextlib.contextmanager
def on_whole_batch(module: nn.Module, *, together: bool) -> Iterator[None]:
    """Inside, with ``together``, the value of a batch is that of all replicas' batches."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)] if together else []
    with replaced([(metric.__dict__, "dist_sync_on_step", True) for metric in metrics]):
        yield


def apart(
    module: nn.Module, around: Callable[[], contextlib.AbstractContextManager[None]]
) -> contextlib.AbstractContextManager[None]:
    """Inside, what metrics do with what a step gives them is done ``around`` something."""
    entries: list[tuple[dict[str, Any], str, Any]] = []
    for child in module.modules():
        if isinstance(child, Metric):
            for name in ("update", "forward"):
                entries.append((child.__dict__, name, _around(getattr(child, name), around)))
    return replaced(entries)


def _around(
    function: Callable[..., Any], around: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return call


def _tolerant(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return function(*args, **kwargs)
            except (ValueError, RuntimeError, IndexError, ZeroDivisionError):
                return torch.tensor(float("nan"))

    return call
