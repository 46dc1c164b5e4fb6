"""Undoing what a trial run did to a module's state: buffers, counters, lists, attributes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from strategies.runtime.replay.hole import Hole, exchange
from strategies.runtime.rng import kept_generators


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Runs the body, then puts attributes, containers, buffers and random states back."""
    modules = [(child, dict(child.__dict__)) for child in module.modules()]
    containers: list[tuple[Any, Any]] = []
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    for _, state in modules:
        for value in state.values():
            _remember(value, containers, tensors)
    python_state = random.getstate()
    try:
        with kept_generators():
            yield
    finally:
        random.setstate(python_state)
        for child, state in modules:
            child.__dict__.clear()
            child.__dict__.update(state)
        for container, content in containers:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        for tensor, saved in tensors.values():
            _restore(tensor, saved)


class KeptObjects:
    """Objects and containers inside a call's arguments, as they were; tensors are shared.

    A layer may change a cache that it was given before it turns out that it has to run again.
    """

    def __init__(self, value: Any, depth: int = 6) -> None:
        self._saved: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._walk(value, depth)

    def restore(self) -> None:
        """Puts the contents back, in place."""
        for container, content in self._saved:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)

    def _walk(self, value: Any, depth: int) -> None:
        if (
            isinstance(value, Tensor | nn.Module | type)
            or callable(value)
            or id(value) in self._seen
        ):
            return
        self._seen.add(id(value))
        items: Any = ()
        if isinstance(value, tuple):
            items = value
        elif type(value) is list or type(value) is dict:
            self._saved.append((value, value.copy()))
            items = value.values() if isinstance(value, dict) else value
        elif hasattr(value, "__dict__"):
            items = (vars(value),)
        for item in items if depth else ():
            self._walk(item, depth - 1)


def _remember(
    value: Any, containers: list[tuple[Any, Any]], tensors: dict[int, tuple[Tensor, Tensor]]
) -> None:
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter | Hole) and not value.is_meta:
            tensors[id(value)] = (value, value.detach().clone())
    elif type(value) in (list, dict, set) or isinstance(value, dict):
        containers.append((value, value.copy()))
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Tensor):
                _remember(item, containers, tensors)


def _restore(tensor: Tensor, saved: Tensor) -> None:
    if isinstance(tensor, Hole):
        exchange(tensor, saved)
    elif not torch.equal(tensor, saved):
        with torch.no_grad():
            tensor.copy_(saved)
