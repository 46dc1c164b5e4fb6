"""Places outside of its module in which the code of a user's step keeps values.

Its class, the files that its methods speak of, callbacks and data modules of its trainer: numbers
and containers there are as much the step's state as attributes of the module are.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import LightningModule
from torch import Tensor

from strategies.models.contents import LIBRARIES, PLAIN, kind_of

ABSENT: Any = object()


# What Lightning and torch keep on every module, and the doors that a replay puts there.
BOOKKEEPING = frozenset(LightningModule().__dict__) | {"log", "log_dict", "forward"}


@dataclass(frozen=True, slots=True)
class Slot:
    """A place that has a value: of a module, its class, its file, or a callback of its trainer.

    Attributes:
        module: The submodule's name; of a variable its file's, of a callback its own.
        kind: ``attribute``, ``buffer``, ``class``, ``file``, ``callback``, ``data`` or ``trainer``.
        key: The attribute's name.
    """

    module: str
    kind: str
    key: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.key}" if self.module else self.key

    @property
    def words(self) -> str:
        """As a message names it."""
        if self.kind in ("class", "file"):
            where = "a variable of its class" if self.kind == "class" else "a global variable"
            return f"{self.key} ({where})"
        return (
            f"self.trainer.{self.name}"
            if self.kind in ("callback", "data")
            else f"self.{self.name}"
        )


_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward")


@dataclass(frozen=True, slots=True)
class Place:
    """One of them: what is there now, and how to put something there."""

    slot: Slot
    get: Callable[[], Any]
    put: Callable[[Any], None]


def of_class(kind: type) -> Iterator[Place]:
    """Values that somebody's class has, numbers and containers."""
    seen: set[str] = set()
    for base in kind.__mro__:
        for key, value in vars(base).items() if _is_users(base.__module__) else ():
            own = type(value) in PLAIN or kind_of(_plainly(value)) is not None
            if own and key not in seen and not (key.startswith("__") and key.endswith("__")):
                seen.add(key)
                yield Place(
                    Slot("", "class", key), _getter(vars(base), key), _class_setter(base, key)
                )


def _plainly(value: Any) -> Any:
    """A function that a class has, without what makes a method or a property of it."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def of_files(kind: type) -> Iterator[Place]:
    """Variables of files that the module's steps, and what they call, speak of.

    What hooks of layers leave there is their stage's own, as what layers keep.
    """
    names: dict[tuple[str, str], bool] = {}
    functions: dict[FunctionType, set[str]] = {}  # with attributes that somebody gives them
    methods = _methods(kind)
    own = {id(_plainly(method)) for found in methods.values() for method in found}
    todo: list[Any] = [found for name in _STEPS for found in methods.get(name, ())]
    seen: set[int] = set()
    while todo:
        found = _plainly(todo.pop())
        if id(found) in seen or not _is_users(getattr(found, "__module__", None)):
            continue
        seen.add(id(found))
        if isinstance(found, type):
            todo += [v for v in vars(found).values() if not isinstance(v, Tensor)]
        if not isinstance(found, FunctionType):
            continue
        if id(found) not in own:
            functions.setdefault(found, set())
        for name, key in _given_attributes(found.__code__):
            if isinstance(there := found.__globals__.get(name), FunctionType):
                functions.setdefault(there, set()).add(key)
        words, assigned = _words(found.__code__)
        todo += [method for word in words & methods.keys() for method in methods[word]]
        for name in words & found.__globals__.keys():
            value = found.__globals__[name]
            if isinstance(value, FunctionType | type):
                todo.append(value)
            elif isinstance(value, ModuleType):
                if _is_users(value.__name__):
                    todo += [v for w in words if callable(v := vars(value).get(w))]
                    for word in words & vars(value).keys():
                        names[value.__name__, word] = True
            else:
                file = found.__globals__.get("__name__", "")
                names[file, name] = names.get((file, name), False) or name in assigned
    for (file, name), assigned_there in names.items():
        table: Any = vars(sys.modules[file]) if file in sys.modules else {}
        value = table.get(name, ABSENT)
        if (type(value) in PLAIN and assigned_there) or kind_of(value) is not None:
            slot = Slot(file, "file", name)
            yield Place(slot, _getter(table, name), _setter(table, name))
    for function, keys in functions.items():
        yield from _of_function(function, keys)


def _of_function(function: FunctionType, given: Iterable[str]) -> Iterator[Place]:
    """What a function keeps from call to call: its attributes, and what it has closed over."""
    table, place = vars(function), f"{function.__module__}.{function.__qualname__}"
    for key in sorted({*table, *given}):
        if not key.startswith("__"):
            yield Place(Slot(place, "file", key), _getter(table, key), _setter(table, key))
    if function.__closure__:
        slot = Slot(function.__module__, "file", function.__qualname__)
        yield Place(slot, lambda: function, lambda _: None)


@lru_cache(maxsize=4096)  # A process trains more than once, and reading takes long.
def _given_attributes(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Global names in some code to which it gives attributes (``f.calls = 0``), and which."""
    before = None
    found = []
    for one in dis.get_instructions(code):
        if one.opname == "STORE_ATTR" and before is not None and before.opname == "LOAD_GLOBAL":
            found.append((str(before.argval), str(one.argval)))
        before = one
    for part in code.co_consts:
        if isinstance(part, CodeType):
            found += _given_attributes(part)
    return tuple(found)


def _methods(kind: type) -> dict[str, list[Any]]:
    """By name, what somebody's classes have under it."""
    found: dict[str, list[Any]] = {}
    for base in kind.__mro__:
        for name, value in vars(base).items() if _is_users(base.__module__) else ():
            found.setdefault(name, []).append(value)
    return found


def speaks_of(kind: type, word: str) -> bool:
    """Whether the code of somebody's classes has a name."""
    functions = (_plainly(value) for values in _methods(kind).values() for value in values)
    return any(word in _words(f.__code__)[0] for f in functions if isinstance(f, FunctionType))


@lru_cache(maxsize=4096)
def _words(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names in some code, and those of them that it assigns to variables of its file."""
    words = set(code.co_names)
    assigned = set()
    # Reading instructions takes a thousand times as long as looking for one among their bytes.
    if dis.opmap["STORE_GLOBAL"] in code.co_code[::2]:
        assigned = {
            str(one.argval) for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL"
        }
    for part in code.co_consts:
        if isinstance(part, CodeType):
            more = _words(part)
            words |= more[0]
            assigned |= more[1]
    return frozenset(words), frozenset(assigned)


def of_trainer(trainer: Any, *, callbacks: bool) -> Iterator[Place]:
    """What data modules of somebody's own keep, on the surface.

    And ``callbacks``, where the module speaks of them; others are written by hooks of layers, too.
    """
    owners: list[tuple[str, Any]] = [
        (f"callbacks[{number}]", callback)
        for number, callback in enumerate(getattr(trainer, "callbacks", ()) if callbacks else ())
        if isinstance(callback, pl.Callback)
    ]
    owners.append(("datamodule", getattr(trainer, "datamodule", None)))
    for name, owner in owners:
        if owner is None or not _is_users(type(owner).__module__):
            continue
        table = vars(owner)
        for key, value in table.items():
            kind = "callback" if name != "datamodule" else "data"
            small = type(value) in PLAIN or (kind == "callback" and kind_of(value) is not None)
            if small and key not in BOOKKEEPING:
                slot = Slot(name, kind, key)
                yield Place(slot, _getter(table, key), _setter(table, key))


def _is_users(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in LIBRARIES


def _getter(table: Any, key: str) -> Callable[[], Any]:
    return lambda: table.get(key, ABSENT)


def _setter(table: Any, key: str) -> Callable[[Any], None]:
    return lambda value: table.pop(key, None) if value is ABSENT else table.update({key: value})


def _class_setter(kind: type, key: str) -> Callable[[Any], None]:
    return lambda value: setattr(kind, key, value)
