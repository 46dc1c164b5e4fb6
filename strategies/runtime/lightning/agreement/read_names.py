"""Which names the user's code reads in steps and in hooks, from the code alone.

A module keeps much that no step reads: folders, run names, what rank 0 alone has. That may differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor

from strategies.models.stage_model import STEP_NAMES
from strategies.runtime.lightning.agreement.module_digest import is_own

_BESIDE = frozenset([*dir(pl.LightningModule), *dir(pl.Callback)])
_BESIDE -= {"forward", *STEP_NAMES.values()}
# What runs before the first step makes values, and reads them for that alone.
_MAKING = frozenset(
    {"__init__", "__new__", "__repr__", "__setstate__", "__getstate__", "extra_repr"}
)
# Of the others those that may change what is trained, or how.
_HOOKS = re.compile(
    "fit_start|train_start|train_epoch|train_batch|optimizer_|scheduler|backward|zero_grad|gradient"
)
_PLAIN: Any = bool | int | float | str | Tensor | np.ndarray | list | tuple | dict | set | frozenset


@dataclass
class ReadNames:
    """Names in the user's code.

    Attributes:
        steps: In steps, forwards, and all methods and functions that are no hooks.
        hooks: In hooks between the batches of a training.
        constants: Plain values of classes and of files that this code reads, by place.
        callbacks: In callbacks, but for what runs before or after a training.
    """

    steps: set[str] = field(default_factory=set)
    hooks: set[str] = field(default_factory=set)
    constants: dict[str, Any] = field(default_factory=dict)
    callbacks: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, kinds: Iterable[type]) -> ReadNames:
        """Of the methods of classes, as far as these are the user's own."""
        found, seen = cls(), set[CodeType]()
        for kind in dict.fromkeys(base for each in kinds for base in each.__mro__):
            if not is_own(kind.__module__):
                continue
            for name, value in vars(kind).items():
                if name in _MAKING or (name in _BESIDE and not _HOOKS.search(name)):
                    continue
                names = found.hooks if name in _BESIDE else found.steps
                for function in _functions(value):
                    found._read(function, names, seen)
                if isinstance(value, _PLAIN) and not name.startswith("__"):
                    found.constants[f"{kind.__qualname__}.{name}"] = value
        return found

    def _read(self, function: FunctionType, names: set[str], seen: set[CodeType]) -> None:
        todo = [function]
        while todo:
            function = todo.pop()
            if function.__code__ in seen or not is_own(function.__module__ or ""):
                continue
            seen.add(function.__code__)
            words = set(_words(function.__code__))
            names |= words
            for word in words & function.__globals__.keys():
                value = function.__globals__[word]
                todo += _functions(value)
                if isinstance(value, _PLAIN) and not word.startswith("__"):
                    self.constants[f"{function.__module__}.{word}"] = value


# By these a hook comes to a module's parameters.
_WAYS = {
    "parameters", "named_parameters", "get_parameter", "_parameters", "state_dict", "weight",
    "bias",
}  # fmt: skip
_LIBRARIES = ("lightning", "numpy", "torch")


def reads_parameters(hook: Any) -> bool:
    """Whether a hook, or a function that it calls by name, reads parameters, from its code."""
    todo, seen = [hook], set[CodeType]()
    while todo:
        hook = todo.pop()
        function = getattr(hook, "func", hook)  # of a partial
        owner = getattr(function, "__self__", None)
        function = getattr(function, "__func__", function)
        if not hasattr(function, "__code__"):
            function = getattr(type(function), "__call__", None)  # noqa: B004
        code = getattr(function, "__code__", None)
        library = str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES
        if code is None or code in seen or library:
            continue
        seen.add(code)
        words = set(_words(code))
        if words & _WAYS:
            return True
        cells = dict(_cells(function))
        for word in words | cells.keys():
            for found in (
                cells.get(word), function.__globals__.get(word), getattr(type(owner), word, None)
            ):  # fmt: skip
                todo += [found] if isinstance(found, FunctionType | MethodType | partial) else []
    return False


def _cells(function: Any) -> Iterator[tuple[str, Any]]:
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions that a class's entry consists of."""
    if isinstance(value, property):
        parts: tuple[Any, ...] = (value.fget, value.fset)
    else:
        value = getattr(value, "__func__", value)
        parts = (value, getattr(value, "__wrapped__", None))
    yield from (part for part in parts if isinstance(part, FunctionType))


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _words(part)
        elif isinstance(part, str) and part.isidentifier():  # getattr(self, "name")
            yield part
