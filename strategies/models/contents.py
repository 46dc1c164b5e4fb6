"""Objects that can be changed in place: how they are read, compared and filled again.

A step may change anything that it keeps: a list of lists, an object with slots, an array of NumPy.
An adapter reads such an object into a copy of what it holds and fills the object from that copy;
it stays the same object. ``snapshot.py`` looks after tensors and modules.
"""

from __future__ import annotations

import argparse
import copyreg
import functools
import operator
import sys
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from typing import Any

from torch import Tensor, nn

MISSING: Any = object()
"""Stands for a value where there is none."""

CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric",
    "lightning_utilities", "numpy", "transformers", "omegaconf", "wandb", "tensorboard",
    "tokenizers", "strategies",
}  # fmt: skip
_NOT_LOOKED_INTO = (Tensor, nn.Module, type, BaseException, Enum)
_RECORDS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)


def is_library(module_name: str | None) -> bool:
    """Whether code of this module comes from Python or a library, not from the user."""
    return (module_name or "").partition(".")[0] in _LIBRARIES


class Adapter:
    """Reads and fills objects of one kind, by the methods of the builtin type.

    A subclass may forbid or change its own methods.
    """

    def read(self, value: Any) -> Any:
        raise NotImplementedError

    def fill(self, value: Any, content: Any) -> None:
        raise NotImplementedError

    def items(self, content: Any) -> Iterable[tuple[Any, Any]]:
        """What is inside, by keys that ``put`` takes."""
        return enumerate(content)

    def put(self, value: Any, key: Any, item: Any) -> None:
        value[key] = item

    def same(self, value: Any, content: Any) -> bool:
        return _same_items(self.read(value), content)

    def mark(self, value: Any) -> Any:
        """Something small that is equal as long as nothing changes on the surface."""
        return tuple([item_mark(item) for _, item in self.items(self.read(value))])


class _Dict(Adapter):
    def read(self, value: Any) -> Any:
        return dict(dict.items(value))

    def items(self, content: Any) -> Iterable[tuple[Any, Any]]:
        return content.items()  # type: ignore[no-any-return]

    def put(self, value: Any, key: Any, item: Any) -> None:
        dict.__setitem__(value, key, item)

    def same(self, value: Any, content: Any) -> bool:
        now = self.read(value)
        same_keys = _same_items(list(now), list(content))
        return same_keys and _same_items(list(now.values()), list(content.values()))

    def fill(self, value: Any, content: Any) -> None:
        dict.clear(value)
        dict.update(value, content)


class _Ordered(_Dict):
    """It keeps its order beside the table, which a dict's methods do not know of."""

    def read(self, value: Any) -> Any:
        return dict(OrderedDict.items(value))

    def put(self, value: Any, key: Any, item: Any) -> None:
        OrderedDict.__setitem__(value, key, item)

    def fill(self, value: Any, content: Any) -> None:
        OrderedDict.clear(value)
        for key, item in content.items():
            OrderedDict.__setitem__(value, key, item)


class _List(Adapter):
    def read(self, value: Any) -> Any:
        return list(list.__iter__(value))

    def fill(self, value: Any, content: Any) -> None:
        list.clear(value)
        list.extend(value, content)


class _Deque(Adapter):
    def read(self, value: Any) -> Any:
        return list(deque.__iter__(value))

    def fill(self, value: Any, content: Any) -> None:
        deque.clear(value)
        deque.extend(value, content)


class _Set(Adapter):
    def read(self, value: Any) -> Any:
        return set(set.__iter__(value))

    def same(self, value: Any, content: Any) -> bool:
        return set.__eq__(value, content) is True

    def fill(self, value: Any, content: Any) -> None:
        set.clear(value)
        set.update(value, content)

    def put(self, value: Any, key: Any, item: Any) -> None:
        pass


class _Tuple(Adapter):
    """It cannot be changed, but what is in it can."""

    def read(self, value: Any) -> Any:
        return value

    def same(self, value: Any, content: Any) -> bool:
        return True

    def fill(self, value: Any, content: Any) -> None:
        pass

    def put(self, value: Any, key: Any, item: Any) -> None:
        pass


class _Attributes(_Dict):
    """An object of a user's own class, with or without slots."""

    def read(self, value: Any) -> Any:
        slots = _slots(type(value))
        found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        return found | getattr(value, "__dict__", {})

    def put(self, value: Any, key: Any, item: Any) -> None:
        object.__setattr__(value, key, item)

    def fill(self, value: Any, content: Any) -> None:
        now = self.read(value)
        for name in now.keys() - content.keys():
            object.__delattr__(value, name)
        for name, item in content.items():
            if now.get(name, MISSING) is not item:
                object.__setattr__(value, name, item)


class _Array(Adapter):
    def read(self, value: Any) -> Any:
        return value.copy()

    def items(self, content: Any) -> Iterable[tuple[Any, Any]]:
        return ()

    def same(self, value: Any, content: Any) -> bool:
        return bool(value.shape == content.shape and value.tobytes() == content.tobytes())

    def fill(self, value: Any, content: Any) -> None:
        value[...] = content

    def mark(self, value: Any) -> Any:
        return value.tobytes()  # Of objects, their addresses.


class _Frame(_Array):
    """A table of pandas: no rank can send it to another, so a step that changes one is refused."""

    def same(self, value: Any, content: Any) -> bool:
        return bool(value.equals(content))

    def fill(self, value: Any, content: Any) -> None:
        value._mgr = content.copy()._mgr

    def mark(self, value: Any) -> Any:
        return value.to_json()


_ATTRIBUTES, _ARRAY, _FRAME = _Attributes(), _Array(), _Frame()
# Subclasses first.
_CONTAINER_ADAPTERS: tuple[tuple[type, Adapter], ...] = (
    (OrderedDict, _Ordered()), (dict, _Dict()), (list, _List()), (set, _Set()), (deque, _Deque()),
    (tuple, _Tuple()),
)  # fmt: skip


def adapter_of(value: Any) -> Adapter | None:
    """How to look into a value; None where nothing in it can change, or nobody knows how."""
    found: Any = type(value)
    return _adapter_of(found, False)


def is_record(value: Any) -> bool:
    """Whether it is an object of a user's own class, with attributes of its own."""
    return adapter_of(value) is _ATTRIBUTES


def is_foreign(value: Any) -> bool:
    """Whether it is an object of a library that nobody knows how to bring to other processes."""
    known = isinstance(value, (*PLAIN, *_NOT_LOOKED_INTO)) or callable(value)
    adapter, library = adapter_of(value), type(value).__module__.partition(".")[0]
    return not known and (adapter is None or adapter is _FRAME) and library != "numpy"


def walk(
    value: Any, *, depth: int = 12, seen: set[int] | None = None, libraries: bool = False
) -> Iterator[tuple[Any, Adapter | None]]:
    """A value and all that is inside, each object once; modules are not looked into.

    ``libraries``: objects of libraries are.
    """
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    kind: Any = type(value)
    adapter = _adapter_of(kind, libraries)
    yield value, adapter
    if adapter is None or not depth:
        return
    seen.add(id(value))
    for _, item in adapter.items(adapter.read(value)):
        if type(item) not in PLAIN:
            yield from walk(item, depth=depth - 1, seen=seen, libraries=libraries)
    if libraries and adapter is not _ATTRIBUTES and getattr(value, "__dict__", None):
        yield from walk(vars(value), depth=depth - 1, seen=seen, libraries=True)


class KeptObjects:
    """Objects and containers in a call's arguments, as they were; tensors are shared.

    A layer may change a cache that it was given before it turns out that it has to run again.
    """

    def __init__(self, value: Any) -> None:
        self._kept = [
            (found, adapter, adapter.read(found))
            for found, adapter in walk(value, depth=10, libraries=True)
            if adapter is not None
        ]

    def restore(self) -> None:
        for value, adapter, content in self._kept:
            if not adapter.same(value, content):
                adapter.fill(value, content)


def is_same(value: Any, before: Any) -> bool:
    """Whether nothing has happened; equal numbers and texts are the same, tensors are not."""
    if value is before:
        return True
    return type(value) is type(before) and type(value) in PLAIN and bool(value == before)


def item_mark(value: Any) -> Any:
    """What tells one value from another that takes its place."""
    return value if type(value) in PLAIN else id(value)


def _same_items(now: Collection[Any], before: Collection[Any]) -> bool:
    if len(now) != len(before):
        return False
    if all(map(operator.is_, now, before)):
        return True
    try:  # A tensor may equal another one and belong to another graph.
        return not any(isinstance(item, Tensor) for item in now) and bool(now == before)
    except Exception:
        return False


@functools.cache
def _adapter_of(kind: Any, libraries: bool) -> Adapter | None:
    if issubclass(kind, PLAIN) or issubclass(kind, _NOT_LOOKED_INTO):
        return None
    for container, adapter in _CONTAINER_ADAPTERS:
        if issubclass(kind, container):
            return adapter
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return _ARRAY
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series"):
        return _FRAME
    if issubclass(kind, _RECORDS):
        return _ATTRIBUTES
    own = bool(kind.__dictoffset__) or bool(_slots(kind))
    called = any("__call__" in vars(base) for base in kind.__mro__)
    looked_into = libraries or not is_library(kind.__module__)
    return _ATTRIBUTES if own and not called and looked_into else None


_slots: Any = vars(copyreg)["_slotnames"]  # of all bases, as pickle reads them
