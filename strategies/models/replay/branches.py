"""Whether a step may go one way or another, as its code shows it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dis import get_instructions
from types import CodeType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn


def has_branches(module: LightningModule, name: str, units: Iterable[str]) -> bool:
    """Whether a method may go one way or another, so that it does not always call the same layers.

    That is looked for in its code, in the forwards of what holds the ``units`` or stands between
    them (an activation of one's own), and in the functions and methods of the same object that
    either names. Torch's own classes and transformers' do not count: what they choose by is their
    configuration.
    """
    inside = {id(child) for unit in units for child in module.get_submodule(unit).modules()}
    holders = [child for child in module.children() for child in child.modules()]
    holders = [child for child in holders if id(child) not in inside]
    todo: list[tuple[nn.Module, str]] = [(module, name), (module, "forward")]
    todo += [(each, "forward") for each in holders if not _from_library(type(each).__module__)]
    seen: set[CodeType] = set()
    while todo:
        owner, name = todo.pop()
        own = [kind for kind in type(owner).__mro__ if not _from_library(kind.__module__)]
        # Also what is overridden: ``super()`` may call it.
        spaces = (vars(owner), *map(vars, own))
        parts = [part for space in spaces if name in space for part in _code_of(space[name])]
        words: set[str] = set()
        while parts:
            code, known = parts.pop()
            if code in seen:
                continue
            seen.add(code)
            if _chooses(code):
                return True
            words.update(code.co_names)
            for word in code.co_names:
                called = known.get(word)
                if inspect.isfunction(called) and not _from_library(called.__module__):
                    parts += _code_of(called)
            parts += [(each, known) for each in code.co_consts if isinstance(each, CodeType)]
        todo += [(owner, word) for word in words if any(word in vars(kind) for kind in own)]
    return False


# What a step may count layers by, or pick them with.
_CHANGING = frozenset(
    {"batch_idx", "current_epoch", "global_step", "trainer", "randperm", "shuffle", "choice"}
)
_PICKED_BY = ("LOAD_FAST", "LOAD_ATTR", "CALL")


def _chooses(code: CodeType) -> bool:
    """Whether code has a condition, reads what changes from step to step, or picks by a name."""
    before = ""
    for each in get_instructions(code):
        if "JUMP" in each.opname and "IF" in each.opname:
            return True
        if each.opname.startswith("LOAD_") and each.argval in _CHANGING:
            return True
        if each.opname == "BINARY_SUBSCR" and before in _PICKED_BY:
            return True
        before = before if each.opname == "CACHE" else each.opname
    return False


def _code_of(found: Any) -> list[tuple[CodeType, dict[str, Any]]]:
    """A function's code and what it knows by name; nothing for what is no function."""
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    found = inspect.unwrap(found) if callable(found) else None
    return [(found.__code__, found.__globals__)] if inspect.isfunction(found) else []


def _from_library(module: str) -> bool:
    return module.partition(".")[0] in (
        "builtins", "lightning", "pytorch_lightning", "torch", "torchmetrics", "transformers",
    )  # fmt: skip
