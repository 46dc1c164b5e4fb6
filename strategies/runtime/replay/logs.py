"""Capturing ``self.log`` calls instead of handing them to Lightning.

Lightning aggregates log calls per process; in a pipeline a value exists on one stage only, so the
runtime repeats the calls on every rank. The arguments are kept as the user gave them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.runtime.fetch import Fetch
from strategies.runtime.replay.gate import MARKER, unwatched
from strategies.runtime.replay.source import user_line
from strategies.runtime.stage_model import LogCall

_LOG = inspect.signature(LightningModule.log)
_LOG_DICT = inspect.signature(LightningModule.log_dict)


class LogCapture:
    """Stands in for ``self.log`` and ``self.log_dict`` during one replay.

    Args:
        keep: Called at every log call with the value; tells whether this stage keeps it.
    """

    def __init__(self, keep: Callable[[Any], bool]) -> None:
        self._keep = keep
        self._kept: list[tuple[str, Tensor | float, dict[str, Any]]] = []

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Replacement of ``LightningModule.log``."""
        bound = _LOG.bind(None, *args, **kwargs).arguments
        self._add(bound["name"], bound["value"], _options(bound, "self", "name", "value"))

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        """Replacement of ``LightningModule.log_dict``."""
        bound = _LOG_DICT.bind(None, *args, **kwargs).arguments
        metrics: Mapping[str, Any] = bound["dictionary"]
        for name, value in metrics.items():
            self._add(str(name), value, _options(bound, "self", "dictionary"))

    def calls(self) -> tuple[LogCall, ...]:
        """The kept calls; values on a device stay there until ``fetched`` brings them."""
        return tuple(
            LogCall(name, value.item() if _at_hand(value) else value, options)
            for name, value, options in self._kept
        )

    def _add(self, name: str, value: Any, options: dict[str, Any]) -> None:
        if self._keep(value):
            self._kept.append((name, unwatched(MARKER, lambda: _number(name, value)), options))


def _at_hand(value: Tensor | float) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def fetched(calls: Sequence[LogCall]) -> list[LogCall]:
    """The calls with plain numbers; what is on a device comes in one transfer."""
    return start_fetching(calls)()


def start_fetching(calls: Sequence[LogCall]) -> Callable[[], list[LogCall]]:
    """What gives ``fetched(calls)`` later; waits for no device until then."""
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
    if isinstance(value, nn.Module):
        value = _batch_value(value)
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


def _batch_value(metric: Any) -> Any:
    """The value of a torchmetrics object for this batch, as Lightning logs it on a step."""
    value = getattr(metric, "_forward_cache", None)
    return metric.compute() if value is None else value
