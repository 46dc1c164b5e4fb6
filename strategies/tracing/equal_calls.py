"""Which calls of layers take equally much: by types, sizes and settings, without running them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from strategies.models.nested import leaves
from strategies.models.replay.hole import Spec

# Attributes that number a layer and decide nothing else.
_NUMBERS = {
    "idx", "index", "layer_idx", "layer_id", "layer_index", "layer_number", "block_idx",
    "block_index", "name", "layer_name",
}  # fmt: skip
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Slot:
    """Place of a tensor in the arguments of a call: what is known of it, and which value it is."""

    # No dataclass: containers are searched for places, and dataclasses are containers.
    __slots__ = ("key", "parameter", "spec")

    def __init__(self, spec: Spec, key: Hashable, *, parameter: bool = False) -> None:
        self.spec = spec
        self.key = key
        self.parameter = parameter


def structure(module: nn.Module) -> Hashable:
    """Equal for modules that take equally much: types, sizes and settings, but no numbers."""
    found = []
    for name, child in module.named_modules():
        settings = tuple(
            (key, _setting(value))
            for key, value in sorted(vars(child).items())
            if key not in _NUMBERS and (key == "training" or key not in _OF_EVERY_MODULE)
        )
        held = tuple(
            (key, tuple(t.shape), str(t.dtype), t.requires_grad)
            for table in (child._parameters, child._buffers)
            for key, t in table.items()
            if t is not None
        )
        found.append((name, type(child), settings, held))
    return tuple(found)


def _setting(value: Any) -> Hashable:
    """Equal for equal values of plain types, and for one object that layers share."""
    if isinstance(value, bool | int | float | str | type(None)):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_setting, value))
    if isinstance(value, dict):
        return dict, tuple((_setting(key), _setting(each)) for key, each in value.items())
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    return id(value)


def described(value: Any) -> Hashable:
    """Equal for arguments of equal shapes."""
    found: list[Hashable] = []
    for leaf in leaves(value):
        if isinstance(leaf, Slot):
            found.append(leaf.spec)
        elif isinstance(leaf, Tensor):
            found.append(Spec.of(leaf))
        elif isinstance(leaf, bool | int | float | str | type(None)):
            found.append(leaf)
        else:
            found.append(type(leaf).__qualname__)
    return tuple(found)
