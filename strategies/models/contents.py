"""What Python objects hold that can be changed in place, and how to look into them and fill them.

A step may leave its traces in anything: a list of lists, an object with slots, an array of NumPy.
Each kind of object is read into a copy of what it holds, compared with it, and filled again from
it; it stays the same object. Tensors and modules are looked after elsewhere.
"""

from __future__ import annotations

import argparse
import functools
import io
import operator
import random
import sys
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
PLAIN = (bool, int, float, complex, str, bytes, type(None))
LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric",
    "lightning_utilities", "numpy", "transformers", "omegaconf", "wandb", "tensorboard",
    "tokenizers", "strategies",
}  # fmt: skip
_NOT_LOOKED_INTO = (Tensor, nn.Module, type, BaseException, Enum)
_RECORDS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)


class Kind:
    """How objects of one kind are read and filled; ``read`` gives the copy for all others."""

    def read(self, value: Any) -> Any:
        raise NotImplementedError

    def items(self, content: Any) -> Iterable[tuple[Any, Any]]:
        """What is inside, by keys that ``put`` takes."""
        return ()

    def put(self, value: Any, key: Any, item: Any) -> None:
        value[key] = item

    def same(self, value: Any, content: Any) -> bool:
        try:
            return len(value) == len(content) and bool(value == content)
        except Exception:
            return False  # Tensors answer for each of their elements.

    def fill(self, value: Any, content: Any) -> None:
        raise NotImplementedError

    def mark(self, value: Any) -> Any:
        """Something small that is equal as long as nothing is changed on the surface."""
        return tuple([item_mark(item) for _, item in self.items(self.read(value))])


class _Dict(Kind):
    def read(self, value: Any) -> Any:
        return dict(dict.items(value))

    def items(self, content: Any) -> Iterable[tuple[Any, Any]]:
        return content.items()  # type: ignore[no-any-return]

    def put(self, value: Any, key: Any, item: Any) -> None:
        dict.__setitem__(value, key, item)

    def same(self, value: Any, content: Any) -> bool:
        try:
            return len(value) == len(content) and bool(dict.__eq__(value, content))
        except Exception:
            return False

    def fill(self, value: Any, content: Any) -> None:
        dict.clear(value)  # Past whatever a subclass forbids.
        dict.update(value, content)


class _Ordered(_Dict):
    """It keeps its order beside the table, which a dict's methods do not know of."""

    def put(self, value: Any, key: Any, item: Any) -> None:
        OrderedDict.__setitem__(value, key, item)

    def fill(self, value: Any, content: Any) -> None:
        OrderedDict.clear(value)
        for key, item in content.items():
            OrderedDict.__setitem__(value, key, item)


class _List(Kind):
    def read(self, value: Any) -> Any:
        return list(list.__iter__(value))

    def items(self, content: Any) -> Iterable[tuple[Any, Any]]:
        return enumerate(content)

    def fill(self, value: Any, content: Any) -> None:
        value[:] = content


class _Deque(_List):
    def read(self, value: Any) -> Any:
        return deque(value, value.maxlen)

    def fill(self, value: Any, content: Any) -> None:
        value.clear()
        value.extend(content)


class _Set(Kind):
    def read(self, value: Any) -> Any:
        return set(value)

    def fill(self, value: Any, content: Any) -> None:
        value.clear()
        value.update(content)

    def mark(self, value: Any) -> Any:
        return len(value)


class _Tuple(Kind):
    """It cannot be changed, but what is in it can."""

    def read(self, value: Any) -> Any:
        return value

    def items(self, content: Any) -> Iterable[tuple[Any, Any]]:
        return enumerate(content)

    def put(self, value: Any, key: Any, item: Any) -> None:
        pass

    def same(self, value: Any, content: Any) -> bool:
        return True

    def fill(self, value: Any, content: Any) -> None:
        pass

    def mark(self, value: Any) -> Any:
        return None


class _Attributes(Kind):
    """An object of somebody's own class, with or without slots."""

    def read(self, value: Any) -> Any:
        kind: Any = type(value)
        names = _slots(kind)
        if not names:
            return dict(value.__dict__)
        try:
            found = dict(zip(names, _look_up(names)(value), strict=True))
        except AttributeError:  # Some have no value.
            found = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return found | getattr(value, "__dict__", {})

    def items(self, content: Any) -> Iterable[tuple[Any, Any]]:
        return content.items()  # type: ignore[no-any-return]

    def put(self, value: Any, key: Any, item: Any) -> None:
        object.__setattr__(value, key, item)

    def same(self, value: Any, content: Any) -> bool:
        return super().same(self.read(value), content)

    def fill(self, value: Any, content: Any) -> None:
        for name in [name for name in self.read(value) if name not in content]:
            object.__delattr__(value, name)
        for name, item in content.items():
            object.__setattr__(value, name, item)


class _Array(Kind):
    def read(self, value: Any) -> Any:
        return value.copy()

    def same(self, value: Any, content: Any) -> bool:
        return bool(value.shape == content.shape and value.tobytes() == content.tobytes())

    def fill(self, value: Any, content: Any) -> None:
        value[...] = content

    def mark(self, value: Any) -> Any:
        return value.tobytes() if value.dtype != object else tuple(map(id, value.reshape(-1)))


class _Frame(Kind):
    """A table of pandas: what a step changes in it can be told and taken back, and not be sent."""

    def read(self, value: Any) -> Any:
        return value.copy()

    def same(self, value: Any, content: Any) -> bool:
        return bool(value.equals(content))

    def fill(self, value: Any, content: Any) -> None:
        value._mgr = content.copy()._mgr

    def mark(self, value: Any) -> Any:
        return value.to_json()


class _Cells(Kind):
    """A function's own variables: those it has closed over, and its attributes."""

    def read(self, value: Any) -> Any:
        found: dict[Any, Any] = dict(vars(value))
        for number, cell in enumerate(value.__closure__ or ()):
            try:
                found[number] = cell.cell_contents
            except ValueError:
                continue  # empty
        return found

    def items(self, content: Any) -> Iterable[tuple[Any, Any]]:
        return content.items()  # type: ignore[no-any-return]

    def put(self, value: Any, key: Any, item: Any) -> None:
        if isinstance(key, int):
            value.__closure__[key].cell_contents = item
        else:
            vars(value)[key] = item

    def same(self, value: Any, content: Any) -> bool:
        return super().same(self.read(value), content)

    def fill(self, value: Any, content: Any) -> None:
        for name in [name for name in vars(value) if name not in content]:
            del vars(value)[name]
        for key, item in content.items():
            self.put(value, key, item)


_DICT, _LIST, _SET, _DEQUE, _TUPLE = _Dict(), _List(), _Set(), _Deque(), _Tuple()
_ORDERED, _FRAME = _Ordered(), _Frame()
_ATTRIBUTES, _ARRAY, _CELLS = _Attributes(), _Array(), _Cells()


def kind_of(value: Any) -> Kind | None:
    """How to look into a value; None where nothing in it can change, or nobody knows how."""
    if type(value) is types.FunctionType:
        # What ``super()`` looks for its class in is no variable of anybody's.
        closes = value.__closure__ and value.__code__.co_freevars != ("__class__",)
        inside = closes or value.__dict__
        return _CELLS if inside and not _library(value.__module__) else None
    found: Any = type(value)
    return _kind_of_type(found)


def is_record(value: Any) -> bool:
    """Whether it is an object of somebody's own class, with attributes of its own."""
    return kind_of(value) is _ATTRIBUTES


def is_generator(value: Any) -> bool:
    """Whether numbers are drawn from it: one of NumPy's or Python's own objects for that."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy: Any = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState)


def generator_words(value: Any) -> str:
    """Where such an object stands."""
    if isinstance(value, random.Random):
        return repr(value.getstate())
    numpy: Any = sys.modules["numpy.random"]
    own = value.bit_generator.state if isinstance(value, numpy.Generator) else value.get_state()
    return repr(own)


def is_iterator(value: Any) -> bool:
    """Whether it goes on whenever it is asked: a generator, a count, a pass over a loader."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def is_foreign(value: Any) -> bool:
    """Whether it is an object of a library that nobody knows how to bring to other processes."""
    known = isinstance(value, (*PLAIN, *_NOT_LOOKED_INTO)) or callable(value)
    kind, library = kind_of(value), type(value).__module__.partition(".")[0]
    return not known and (kind is None or kind is _FRAME) and library != "numpy"


def walk(
    value: Any, *, depth: int = 12, seen: set[int] | None = None
) -> Iterator[tuple[Any, Kind | None]]:
    """A value and all that is inside, each object once; modules are not looked into."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    kind = kind_of(value)
    yield value, kind
    if kind is None or not depth:
        return
    seen.add(id(value))
    for _, item in kind.items(kind.read(value)):
        if type(item) not in PLAIN:
            yield from walk(item, depth=depth - 1, seen=seen)


def item_mark(value: Any) -> Any:
    """What tells one value from another that takes its place."""
    return value if type(value) in PLAIN else id(value)


@functools.cache
def _kind_of_type(kind: Any) -> Kind | None:
    if issubclass(kind, PLAIN) or issubclass(kind, _NOT_LOOKED_INTO):
        return None
    for container, how in _CONTAINER_KINDS:
        if issubclass(kind, container):
            return how
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return _ARRAY
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series"):
        return _FRAME
    if issubclass(kind, _RECORDS):
        return _ATTRIBUTES
    own = bool(kind.__dictoffset__) or bool(_slots(kind))
    called = any("__call__" in vars(base) for base in kind.__mro__)
    return _ATTRIBUTES if own and not called and not _library(kind.__module__) else None


_CONTAINER_KINDS: tuple[tuple[type, Kind], ...] = (
    (OrderedDict, _ORDERED), (dict, _DICT), (list, _LIST), (set, _SET), (deque, _DEQUE),
    (tuple, _TUPLE),
)  # fmt: skip


def _library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(found)


@functools.cache
def _look_up(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """All of these attributes at once: objects are read several times per microbatch."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: (getattr(value, names[0]),)
