"""The user's ``self.log`` calls: caught per microbatch, joined per step, repeated on every rank."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from strategies.errors import ModelError
from strategies.models.collectives import LocalGroup
from strategies.models.contents import adapter_of, walk
from strategies.models.nested import replaced
from strategies.models.replay.gate import MARKER, unwatched
from strategies.models.replay.hole import user_line
from strategies.models.stage_model import LogCall
from strategies.models.state import Fetch

_LOG = inspect.signature(LightningModule.log)
_LOG_OPTIONS = frozenset(_LOG.parameters) - {"self", "name", "value"}
_LOG_DICT = inspect.signature(LightningModule.log_dict)
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": sum}


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A log call of one microbatch on one stage; several stages may know the same value.

    Attributes:
        share: The microbatch's share of the batch.
        copy: Weight copy that the microbatch ran through.
    """

    call: LogCall
    share: float
    stage: int
    copy: int


@contextmanager
def captured_logs(module: nn.Module) -> Iterator[LogCapture]:
    capture = LogCapture(lambda _: True, module)
    own = module.__dict__
    with replaced([(own, "log", capture.log), (own, "log_dict", capture.log_dict)]):
        yield capture


def _join_logs(calls: Sequence[tuple[LogCall, float]], *, by_tokens: bool = False) -> list[LogCall]:
    """One call per name from all microbatches of a step, each call with its share of the batch.

    Means are weighted by the calls' ``batch_size``, or by the shares, which alone count where these
    are ``by_tokens``; ``reduce_fx`` of max, min and sum are honoured. Batch sizes add up.
    """
    by_name: dict[str, list[tuple[LogCall, float]]] = {}
    for call, share in calls:
        by_name.setdefault(call.name, []).append((call, share))
    joined = []
    for name, group in by_name.items():
        if group[-1][0].metric is not None:
            joined.append(group[-1][0])  # The object has seen the whole batch.
            continue
        options = dict(group[-1][0].options)
        how = options.get("reduce_fx", "mean")
        how = how if isinstance(how, str) else getattr(how, "__name__", "mean")
        values = [float(call.value) for call, _ in group if call.value is not None]
        if how in _REDUCTIONS:
            value = _REDUCTIONS[how](values)
        else:
            sizes = [None if by_tokens else call.options.get("batch_size") for call, _ in group]
            weights = [float(n or share) for n, (_, share) in zip(sizes, group, strict=True)]
            value = _weighted_mean(values, weights)
        sizes = [call.options.get("batch_size") for call, _ in group]
        if all(isinstance(size, int) for size in sizes):
            options["batch_size"] = sum(sizes)
        joined.append(LogCall(name, value, options))
    return joined


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """What counts nothing may be no number; where nothing counts, all count alike."""
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True) if w) / total


def no_means(
    whole: Sequence[LogCall], parts: Sequence[tuple[Sequence[LogCall], float]], *, loose: bool
) -> tuple[str, ...]:
    """Names of what is another number for all rows than put together from parts of them.

    ``parts`` come with their shares; ``loose`` where numbers have 16 bits.
    """
    joined = _join_logs([(call, share) for calls, share in parts for call in calls])
    means: dict[str, Any] = {call.name: call.value for call in joined}
    numbers: dict[str, Any] = {
        call.name: call.value for call in _join_logs([(call, 1.0) for call in whole])
    }
    close = partial(math.isclose, rel_tol=3e-2 if loose else 1e-4, abs_tol=1e-6)
    return tuple(n for n, value in numbers.items() if not close(value, means.get(n, value)))


def join_entries(entries: Sequence[LogEntry], stage: int) -> list[LogCall]:
    """One call per name, from all microbatches' on a stage."""
    return _join_logs([(entry.call, entry.share) for entry in entries if entry.stage == stage])


def start_packing(
    entries: Sequence[LogEntry], *, by_tokens: bool = False
) -> Callable[[], list[list[Any]]]:
    """What gives one rank's log calls of a step, joined per name, stage and copy, JSON-ready.

    Waits for no device until it is called. ``by_tokens``: their shares are those of tokens.
    """
    entries = list(entries)
    fetched = _start_fetching([entry.call for entry in entries])
    return lambda: _packed(
        [replace(entry, call=call) for entry, call in zip(entries, fetched(), strict=True)],
        by_tokens=by_tokens,
    )


def _packed(entries: Sequence[LogEntry], *, by_tokens: bool) -> list[list[Any]]:
    groups: dict[tuple[str, int, int], list[tuple[LogCall, float]]] = {}
    for entry in entries:
        key = (entry.call.name, entry.stage, entry.copy)
        groups.setdefault(key, []).append((entry.call, entry.share))
    return [
        [*_to_plain(call), sum(share for _, share in group), stage, copy, call.metric]
        for (_, stage, copy), group in groups.items()
        for call in _join_logs(group, by_tokens=by_tokens)
    ]


def unpack_logs(
    packed: Sequence[Sequence[Sequence[Any]]], *, by_tokens: bool = False
) -> list[LogCall]:
    """One call per name, from what all ranks packed; ``by_tokens`` as they have.

    Where several stages know a value, the last one's word counts; what the weight copies saw is
    joined.
    """
    best: dict[tuple[str, int], Sequence[Any]] = {}
    for entry in (entry for rank in packed for entry in rank):
        key = (entry[0], entry[5])
        if key not in best or entry[4] >= best[key][4]:
            best[key] = entry
    names: dict[str, list[Sequence[Any]]] = {}
    for (name, _), entry in sorted(best.items(), key=lambda item: item[0][1]):
        names.setdefault(name, []).append(entry)
    calls = (
        [(LogCall(entry[0], entry[1], entry[2], entry[6]), entry[3]) for entry in found]
        for found in names.values()
    )
    return [
        found[0][0] if len(found) == 1 else _join_logs(found, by_tokens=by_tokens)[0]
        for found in calls
    ]


def join_replicas(
    logs: Sequence[Sequence[LogCall]], own: int, targets: Sequence[float] | None = None
) -> list[LogCall]:
    """One call per name from all replicas' calls of a step; metrics are the ``own`` replica's.

    Replicas count alike, as they do in the loss, unless calls have a ``batch_size``; or by their
    ``targets``, where losses are means over them.
    """
    weights = targets or [1.0] * len(logs)
    joined = _join_logs(
        [
            (call, weight)
            for calls, weight in zip(logs, weights, strict=True)
            for call in calls
            if call.metric is None
        ],
        by_tokens=targets is not None,
    )
    return joined + [call for call in logs[own] if call.metric is not None]


def _to_plain(call: LogCall) -> list[Any]:
    """A JSON-ready triple; options that JSON cannot carry travel by name or not at all."""
    options = {}
    for key, option in call.options.items():
        if callable(option):
            option = getattr(option, "__name__", None)
        if option is None or isinstance(option, str | int | float | bool):
            options[key] = option
    return [call.name, call.value, options]


class LogCapture:
    """Stands in for ``self.log`` and ``self.log_dict`` during one replay.

    Lightning aggregates log calls per process; in a pipeline a value exists on one stage only, so
    the runtime repeats the calls on every rank. The arguments are kept as the user gave them.

    Args:
        keep: Called at every log call with the value; tells whether this stage keeps it.
        module: Where metric objects that are logged have their names.
        whole: Makes whole values of what lies cut over tensor-parallel ranks.
    """

    def __init__(
        self,
        keep: Callable[[Any], bool],
        module: nn.Module | None = None,
        whole: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._keep = keep
        self._whole = whole
        self._module = module
        self._kept: list[LogCall] = []

    def log(self, *args: Any, **kwargs: Any) -> None:
        bound: Mapping[str, Any]
        if len(args) == 2 and kwargs.keys() <= _LOG_OPTIONS:
            bound = {"self": None, "name": args[0], "value": args[1], **kwargs}
        else:
            bound = _LOG.bind(None, *args, **kwargs).arguments  # which says what is wrong
        self._add(bound["name"], bound["value"], _options(bound, "self", "name", "value"))

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        bound = _LOG_DICT.bind(None, *args, **kwargs).arguments
        metrics: Mapping[str, Any] = bound["dictionary"]
        for name, value in metrics.items():
            self._add(str(name), value, _options(bound, "self", "dictionary"))

    def calls(self) -> tuple[LogCall, ...]:
        """The kept calls; values on a device stay there."""
        return tuple(
            replace(call, value=call.value.item()) if _at_hand(call.value) else call
            for call in self._kept
        )

    def _add(self, name: str, value: Any, options: dict[str, Any]) -> None:
        if not self._keep(value):
            return
        metric = None
        if isinstance(value, nn.Module):
            metric = self._name_of(name, value)
            value = getattr(value, "_forward_cache", None)
            if not isinstance(value, Tensor) or value.numel() != 1:
                value = None  # Lightning says on its own that it logs single numbers.
        if metric is None or value is not None:
            given = self._whole(value)
            value = unwatched(MARKER, lambda: _number(name, given))
        self._kept.append(LogCall(name, value, options, metric))

    def _name_of(self, name: str, metric: nn.Module) -> str:
        for place, module in () if self._module is None else self._module.named_modules():
            if module is metric:
                return str(place)
        raise ModelError(
            f"{user_line()}: self.log({name!r}) got a {type(metric).__name__} that is no attribute "
            "of the module, so the ranks cannot tell which one it is. Make it in __init__ "
            "(self.metric = ..., nn.ModuleDict, nn.ModuleList or MetricCollection)."
        )


def _at_hand(value: Tensor | float | None) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _start_fetching(calls: Sequence[LogCall]) -> Callable[[], list[LogCall]]:
    """What gives the calls with plain numbers later; all that is on a device in one transfer."""
    calls = list(calls)
    tensors = [call.value for call in calls if isinstance(call.value, Tensor)]
    if not tensors:
        return lambda: calls
    device = tensors[-1].device
    fetch = Fetch(torch.stack([t.to(device, torch.float64, non_blocking=True) for t in tensors]))

    def numbers() -> list[LogCall]:
        values = iter(fetch.tensor().tolist())
        return [
            replace(call, value=next(values)) if isinstance(call.value, Tensor) else call
            for call in calls
        ]

    return numbers


def _number(name: str, value: Any) -> Tensor | float:
    """The value as it is now: a tensor without dimensions, not fetched from its device yet."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ModelError(
            f"{user_line()}: self.log({name!r}) got a tensor of shape {list(value.shape)}; only "
            "single numbers can be logged. Log its mean()."
        )
    return value.detach().clone().reshape(())


def _options(bound: Mapping[str, Any], *without: str) -> dict[str, Any]:
    return {key: value for key, value in bound.items() if key not in without}


# --------------------------------------------------------------------------------------------------
# torchmetrics objects of a module: who talks to whom when one of them is computed.
#
# Left alone, they would gather over all processes, of which most are other stages: so the last
# stage's rank would wait for ever. Here they gather over the replicas of their own pipeline rank,
# and while a step runs on a microbatch over nobody.
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
            if key in _TABLES or adapter_of(value) is None:
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
