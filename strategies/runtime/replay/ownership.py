"""Parameters by global name: where they are kept, who owns them, how the others are freed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from strategies.runtime.replay.hole import Hole, Spec
from strategies.runtime.replay.path import Path, Position


class ParameterTable:
    """All parameters of the uncut module; tied ones under their first name only.

    Args:
        module: The whole model, uncut.
        device: Device to name for parameters that are still on ``meta``.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        modules = dict(module.named_modules(remove_duplicate=False))
        first: dict[int, str] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._order = {id(m): tuple(m._parameters) for m in modules.values()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            path, _, attribute = name.rpartition(".")
            canonical = first.setdefault(id(parameter), name)
            self._places.setdefault(canonical, []).append((modules[path], attribute))

    @property
    def names(self) -> tuple[str, ...]:
        """Global names in registration order."""
        return tuple(self._places)

    def find(self, name: str) -> nn.Parameter | Hole:
        """The present parameter of that name, or the hole in its place."""
        module, attribute = self._places[name][0]
        found: nn.Parameter | Hole = getattr(module, attribute)
        return found

    def by_identity(self) -> dict[int, str]:
        """Names by ``id`` of the present objects; a module may have replaced some since."""
        return {
            id(getattr(module, attribute)): name
            for name, places in self._places.items()
            for module, attribute in places
        }

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Lets ``parameters()`` list the holes as well: a step may go through all weights."""
        hidden: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in {id(m): m for places in self._places.values() for m, _ in places}.values():
            order = self._order[id(module)]
            table: dict[str, Any] = module._parameters
            if len(table) != len(order):
                hidden.append((table, dict(table)))
                full = {name: getattr(module, name) for name in order if hasattr(module, name)}
                table.clear()
                table.update(full)
        try:
            yield
        finally:
            for table, before in hidden:
                table.clear()
                table.update(before)

    def free(self, names: Iterable[str]) -> None:
        """Replaces parameters by holes: their memory goes, ``parameters()`` skips them."""
        for name in names:
            parameter = self.find(name)
            if isinstance(parameter, Hole):
                continue
            device = self._device if parameter.is_meta else None
            hole = Hole(Spec.of(parameter, device))
            hole.parameter = name
            for module, attribute in self._places[name]:
                module._parameters.pop(attribute, None)
                # setattr, not __dict__: nn.LSTM keeps a list of its weights up to date here.
                setattr(module, attribute, hole)
            # Lists, optimizers or closures of the user may still refer to the object.
            parameter.data = parameter.data.new_empty(0)


def used_parameters(path: Path, start: Position, end: Position, calls: range) -> tuple[str, ...]:
    """Names of the parameters used after ``start`` and up to ``end``, in order of use."""
    names: dict[str, None] = {}
    for call, events in enumerate(path.events):
        for index, event in enumerate(events):
            if start < (call, index + 1) <= end:
                names.update(dict.fromkeys(event.parameters))
        if call in calls:
            names.update(dict.fromkeys(path.calls[call].parameters))
    return tuple(names)
