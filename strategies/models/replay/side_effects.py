"""What a step does outside of its process: files that it writes, programs that it starts.

A step runs on shapes, then per microbatch and stage, and once more for the whole batch. What it
changes in the process is put back; a row in a file is not. So a step with such side effects is
refused, in the first look at it or wherever it comes to one. What it logs or prints is left alone.
"""

from __future__ import annotations

import csv
import gc
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from strategies.errors import ModelError
from strategies.models.contents import PLAIN, is_library, walk
from strategies.models.replay.hole import user_line


class SideEffectError(ModelError):
    """A step changes what is outside of its process."""


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
# Audit events, what they are in words, and which of their arguments says of what.
_EVENTS = {
    "os.remove": ("removes", 0),
    "os.rename": ("renames", 0),
    "os.truncate": ("truncates", 0),
    "os.link": ("links", 0),
    "os.symlink": ("links", 0),
    "sqlite3.connect": ("opens the database", 0),
    "subprocess.Popen": ("starts", 0),
    "os.system": ("starts", 0),
    "os.posix_spawn": ("starts", 0),
    "socket.connect": ("connects to", 1),
}
_TORCH = str(Path(torch.__file__).parent)
# Who may write under a step: the import of a file (its bytecode), logging, compilers' caches.
_MAY = (
    "<frozen importlib",
    str(Path(logging.__file__).parent),
    f"{_TORCH}/_inductor",
    f"{_TORCH}/_dynamo",
    f"{_TORCH}/_functorch",
    str(Path(_TORCH).parent / "triton"),
)
_OWN = threading.local()
_INSTALLED: list[bool] = []


def watched(step: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's step.

    Raises:
        SideEffectError: It changes something outside of the process, even if it catches that.
    """
    if not _INSTALLED:
        _INSTALLED.append(True)
        sys.addaudithook(_on_event)
        opens: dict[str, Any] = vars(torch.serialization)
        opens["_open_zipfile_writer"] = _audited(opens["_open_zipfile_writer"])
    _OWN.refused = None
    try:
        result = step(*arguments)
    except Exception as error:
        if _OWN.refused is not None and error is not _OWN.refused:
            raise _OWN.refused from error
        raise
    if _OWN.refused is not None:
        raise _OWN.refused
    return result


_STEP = watched.__code__


def _audited(opened: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``torch.save`` opens a path below Python, without an event of its own."""

    def open_writer(target: Any) -> Any:
        if isinstance(target, str | os.PathLike):
            sys.audit("open", os.fspath(target), "w", os.O_WRONLY | os.O_CREAT)
        return opened(target)

    return open_writer


def _on_event(event: str, args: Any) -> None:
    if event == "open":
        path, _, flags = args
        if isinstance(path, int) or not flags & _WRITES:
            return
        path = os.fsdecode(path)
        what = "" if path.startswith(("/dev/", "/proc/")) else f"writes {path}"
    elif event in _EVENTS:
        verb, place = _EVENTS[event]
        of = args[place]
        what = "" if of == ":memory:" else f"{verb} {os.fsdecode(of) if _is_path(of) else of}"
    else:
        return
    if what and (writer := _by_step()):
        _OWN.refused = _refusal(f"{user_line()}: a step {what}", of_graph=writer == "wandb")
        raise _OWN.refused


def _is_path(value: Any) -> bool:
    return isinstance(value, str | bytes | os.PathLike)


def _by_step() -> str:
    """Who does it, a step or a hook of wandb in it; empty for imports, messages and compilers."""
    frame: Any = sys._getframe(2)
    writer = "step"
    while frame is not None:
        if frame.f_code is _STEP:
            return writer
        if frame.f_code.co_filename.startswith(_MAY):
            return ""
        if f"{os.sep}wandb{os.sep}integration{os.sep}" in frame.f_code.co_filename:
            writer = "wandb"
        frame = frame.f_back
    return ""


def _refusal(what: str, *, of_graph: bool = False) -> SideEffectError:
    if of_graph:  # Of WandbLogger.watch, in a hook of the module, once per forward of the look.
        return SideEffectError(
            f"{what}, in a hook of WandbLogger.watch, which draws the model's graph in the first "
            "forward; a pipeline runs that once per microbatch and stage.",
            fix="Use WandbLogger.watch(model, log='gradients', log_graph=False).",
        )
    return SideEffectError(
        f"{what}. A pipeline runs the step on made-up values, then once per microbatch and stage, "
        "so it would happen too often. Return the values from the step and do it in "
        "on_train_batch_end, on_validation_batch_end, on_predict_batch_end and the like, which get "
        "them as outputs, where self.trainer.is_global_zero."
    )


# -- files that were opened before the step --------------------------------------------------------


@contextmanager
def files_at_rest(module: nn.Module) -> Iterator[None]:
    """Inside a look at a step; refuses one that writes to a file or database that is open.

    Raises:
        SideEffectError: It does. The file has its length from before then.
    """
    before = [(handle, _length(handle)) for handle in _handles(module)]
    written: list[Any] = []
    try:
        yield
    finally:
        for handle, length in before:
            if _length(handle) != length:
                written.append(handle)
                with suppress(OSError, ValueError):
                    if isinstance(handle, io.IOBase):
                        handle.seek(length)
                        handle.truncate()
                    else:
                        handle.rollback()
    for handle in written:
        name = getattr(handle, "name", type(handle).__name__)
        raise _refusal(f"a step of {type(module).__name__} writes to {name}, which is open")


def _handles(module: nn.Module) -> Iterator[Any]:
    """What is open for writing on a module, on its children, or in the file of its class."""
    tables = [vars(child) for child in module.modules()]
    tables.append(vars(sys.modules.get(type(module).__module__, logging)))
    seen: set[int] = set()
    sqlite: Any = sys.modules.get("sqlite3")
    for table in tables:
        for value in list(table.values()):
            for found, _ in walk(value, depth=3, seen=seen):
                for handle in _behind(found):
                    if isinstance(handle, io.IOBase):
                        if _can_change(handle):
                            yield handle
                    elif sqlite is not None and isinstance(handle, sqlite.Connection):
                        yield handle


def _behind(value: Any) -> list[Any]:
    """A handle itself, or that to which something writes."""
    if isinstance(value, csv.DictWriter):
        value = value.writer
    if type(value).__module__ == "_csv":
        held = gc.get_referents(value)
        return [getattr(each, "__self__", None) for each in held]
    if type(value).__module__ == "sqlite3" and hasattr(value, "connection"):
        return [value.connection]
    return [value]


def _can_change(handle: io.IOBase) -> bool:
    try:
        return handle.fileno() > 2 and handle.writable() and handle.seekable()
    except (OSError, ValueError):
        return False


def _length(handle: Any) -> int:
    return int(handle.tell() if isinstance(handle, io.IOBase) else handle.total_changes)


# -- variables outside of the module ---------------------------------------------------------------
#
# A snapshot follows the module. A number that a step counts up elsewhere would be that of all
# microbatches and stages, so a look at the step refuses it. Tensors do not count: hooks of layers
# gather them, and those are their stage's own.


@contextmanager
def variables_at_rest(module: nn.Module, step: str) -> Iterator[None]:
    """Inside a look at a step; refuses one that changes a number or text outside of its module.

    Raises:
        ModelError: It does. The variable has its value from before then.
    """
    before = [(place, get, put, get()) for place, get, put in _variables(module)]
    changed = []
    try:
        yield
    finally:
        for place, get, put, value in before:
            if get() != value:
                put(value)
                changed.append(place)
    if changed:
        raise ModelError(
            f"{step} changes {changed[0]}, which is not on the module: a pipeline runs the step "
            "once per microbatch and stage, and each run would change it.",
            fix="Keep it on the module (self.n += 1), or change it in on_train_batch_end.",
        )


_Variable = tuple[str, Callable[[], Any], Callable[[Any], Any]]


def _variables(module: nn.Module) -> Iterator[_Variable]:
    """Of the user's classes, and those that the methods of these name."""
    own = [base for base in type(module).__mro__ if not is_library(base.__module__)]
    methods = [m for base in own for m in vars(base).values() if isinstance(m, FunctionType)]
    functions = [v for v in vars(module).values() if isinstance(v, FunctionType)]
    for base in own:
        for key, value in vars(base).items():
            if type(value) in PLAIN and not key.startswith("__"):
                get, put = partial(vars(base).get, key), partial(setattr, base, key)
                yield f"{base.__name__}.{key}", get, put
    named = {(id(m.__globals__), key): m for m in methods for key in m.__code__.co_names}
    for (_, key), method in named.items():
        table = method.__globals__
        value = table.get(key)
        if isinstance(value, FunctionType) and not is_library(value.__module__):
            functions.append(value)
        elif key in table:
            yield from _in_table(f"the global variable {key}", table, key)
    for function in functions:
        for key in vars(function):
            yield from _in_table(f"{function.__name__}.{key}", vars(function), key)
        for key, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with suppress(ValueError):  # not filled yet
                if type(cell.cell_contents) in PLAIN:
                    get, put = partial(getattr, cell, "cell_contents"), partial(setattr, cell)
                    yield f"{key} of {function.__name__}", get, partial(put, "cell_contents")


def _in_table(place: str, table: dict[str, Any], key: str) -> Iterator[_Variable]:
    value = table[key]
    if type(value) in PLAIN:
        yield place, partial(table.get, key), partial(table.__setitem__, key)
    elif isinstance(value, list):
        whole = list(value)
        get = lambda: [item for item in value if type(item) in PLAIN]  # noqa: E731
        yield place, get, lambda _: value.__setitem__(slice(None), whole)


# -- hooks that a step leaves on its layers --------------------------------------------------------
#
# What a step sets on its module is taken back, hooks of layers are not: a note that they are there
# and the hooks would part, and hooks would be added in every step.

_NOTE = "_output_capturing_hooks_installed"
_CAPTURING = "transformers.utils.output_capturing"


@contextmanager
def hooks_at_rest(module: nn.Module, captures: list[nn.Module]) -> Iterator[None]:
    """Inside a look at a step, which must not leave hooks behind.

    Those by which transformers gathers hidden states and attentions are made in the first forward
    that asks for them; ``captures`` gets the models that did, for ``install_capturing``.

    Raises:
        ModelError: The step leaves hooks of a library.
    """
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    before = [
        (path, vars(child)[name], set(vars(child)[name]))
        for path, child in module.named_modules()
        for name in names
    ]
    noted = {id(child) for child in module.modules() if vars(child).get(_NOTE)}
    yield
    for path, table, keys in before:
        for key, hook in table.items():
            if key not in keys and getattr(hook, "__module__", "") != _CAPTURING:
                raise ModelError(
                    f"a step of {type(module).__name__} registers a hook on "
                    f"{path or 'the module'} and leaves it there: a pipeline runs the step once "
                    "per microbatch and stage, and each would add one. Register it in __init__ or "
                    "setup, or remove it before the step ends (handle.remove())."
                )
    captures += [c for c in module.modules() if vars(c).get(_NOTE) and id(c) not in noted]


def install_capturing(captures: list[nn.Module]) -> None:
    """Has the hooks made before the first step, as that would make them."""
    for child in captures:
        sys.modules[_CAPTURING].maybe_install_capturing_hooks(child)
