"""A module's plain values in words that are the same in every process: what a rank is compared by.

Parameters are not among them (stages have one owner), nor are buffers (rank 0's are everybody's).
All else that a process makes for itself is: numbers, texts, tensors, containers, hyper-parameters,
the cells of closures, and the order of submodules. Sets have no order here; dicts have theirs.
Addresses, clocks and process numbers are left out, for they differ where nothing is wrong.
"""

from __future__ import annotations

import datetime
import enum
import functools
import hashlib
import os
import random
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

NUM_NUMBERS = 1_000_000  # are looked at one by one; of what comes behind, shapes and a sample
LIMIT_S = 0.2
_SAMPLE = 64
_DEPTH = 8
_LONG = 100
_HEAD = 6
_CLOCK_S = 3600.0  # a number so close to a clock is one's
_OBJECT = "an object of "
NONE = "None"
WHOLE = "the module"
PARTS, KEYS, BUFFER, HOOKS = "parts of ", "keys of ", "form of ", "hooks of "

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# What Lightning and torch keep of every module; hyper-parameters are looked at by name.
_OWN = frozenset(vars(nn.Module())) | frozenset(vars(pl.LightningModule()))
_OWN |= {"_hparams_initial", "_hparams_name"}
# Handles of this process: what they hold says nothing of what a step computes.
_HANDLES = (
    "_io", "_queue", "_socket", "_thread", "_weakref", "asyncio", "concurrent", "lightning",
    "logging", "multiprocessing", "queue", "socket", "subprocess", "tempfile", "tensorboard",
    "threading", "tqdm", "wandb", "weakref",
)  # fmt: skip


class ModuleDigest:
    """What was found in one module, by place.

    Attributes:
        entries: A text for each place, as ``scale`` or ``layers.0.dropout.p``.
        untaken: Places of objects that have no stable text, with their classes.
        cut: Whether the time was up before all places had been looked at.
        kinds: Classes of all modules and objects that were looked at.
    """

    def __init__(self, module: nn.Module) -> None:
        self.entries: dict[str, str] = {}
        self.untaken: dict[str, str] = {}
        self.cut = False
        self.kinds = {type(child) for child in module.modules()}
        self._values: dict[str, Any] = {}
        self._holders: dict[str, Any] = {}
        self._left = NUM_NUMBERS
        self._known: dict[int, Any] = {}  # objects that stand elsewhere already; kept alive
        self._until = time.perf_counter() + LIMIT_S
        modules = dict(module.named_modules())
        tensors = (*module.parameters(), *module.buffers())
        self._known |= {id(each): each for each in (*modules.values(), *tensors)}
        for name, child in modules.items():
            if self.cut:
                break
            self._take_module(name, child)

    @property
    def mark(self) -> str:
        """One word for all entries, in their order."""
        words = hashlib.sha256()
        for place, text in self.entries.items():
            words.update(f"{place}\0{text}\0".encode(errors="replace"))
        return words.hexdigest()[:16]

    def value(self, place: str) -> Any:
        """What has been found there, where it has a text of its own."""
        return self._values.get(place)

    def holder(self, place: str) -> Any:
        """The module or class whose attribute it is."""
        return self._holders.get(place)

    def shuffled(self, place: str) -> str:
        """The same word for the same items in any order; empty for what has none."""
        value = self._values.get(place)
        if isinstance(value, Tensor) and value.dim() and not value.is_meta:
            value = value.detach().cpu().reshape(-1)[:NUM_NUMBERS].tolist()
        elif isinstance(value, np.ndarray):
            value = value.reshape(-1)[:NUM_NUMBERS].tolist()
        if isinstance(value, Mapping):
            value = list(value.items())
        if not isinstance(value, list | tuple | deque) or len(value) < 2:
            return ""
        self._left, self._until = NUM_NUMBERS, time.perf_counter() + LIMIT_S
        words = sorted(self._items(value, _DEPTH - 2))
        return hashlib.sha256("\0".join(words).encode(errors="replace")).hexdigest()[:16]

    # ------------------------------------------------------------- places

    def _take_module(self, name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        parts = [*module._modules, *module._parameters]
        if parts:
            kind = type(module).__qualname__
            self._note(f"{PARTS}{name or WHOLE}", parts, module, f"{kind} of ")
        for key, buffer in module._buffers.items():
            if buffer is not None:
                form = f"{str(buffer.dtype).removeprefix('torch.')} {list(buffer.shape)}"
                self.entries[f"{BUFFER}{prefix}{key}"] = form
        hooks = [hook for table in _TABLES for hook in getattr(module, table).values()]
        if hooks:
            place = HOOKS + (name or WHOLE)
            self.entries[place] = ", ".join(map(_name, hooks))
            self._values[place] = hooks
        own = vars(module)
        if isinstance(module, Metric):  # Its state is a step's, and empty before the first one.
            own = {k: v for k, v in own.items() if k[0] != "_" and k not in module._defaults}
        for key, value in list(own.items()):
            if key == "_hparams":
                for inner, each in list(value.items()):
                    self.take(f"{prefix}hparams.{inner}", each, module)
            elif key not in _OWN:
                self.take(prefix + key, value, module)

    def take(self, place: str, value: Any, holder: Any, depth: int = 0) -> None:
        """Notes a value, and the values of what it consists of under names of their own."""
        if self.cut or time.perf_counter() > self._until:
            self.cut = True
            return
        self._holders[place] = holder
        try:
            inside = self._inside(value) if depth < _DEPTH else None
            if inside is None:
                self._note(place, value, holder)
                return
            if id(value) in self._known:
                return
            self._known[id(value)] = value
            kind, parts = inside
            if isinstance(value, Mapping):
                self._note(f"{KEYS}{place}", [key for key, _ in parts], holder)
            else:
                self.entries[place] = _OBJECT + kind
            for key, each in parts:
                self.take(f"{place}.{key}", each, holder, depth + 1)
        except Exception:  # What people's classes do when they are looked at, nobody knows.
            self.untaken[place] = type(value).__qualname__

    def _note(self, place: str, value: Any, holder: Any, before: str = "") -> None:
        text = self._text(value, 0)
        if text is _SKIP or self.cut:
            return
        if text is _UNKNOWN:
            self.untaken[place] = type(value).__qualname__
            self.entries[place] = _OBJECT + type(value).__qualname__
            return
        self.entries[place] = before + _short(text)
        self._values[place], self._holders[place] = value, holder

    def _inside(self, value: Any) -> tuple[str, list[tuple[str, Any]]] | None:
        """The class and the parts of what is looked at part by part; None for other values."""
        if isinstance(value, Mapping) and len(value) <= _SAMPLE:
            if all(isinstance(key, str | int) for key in value):
                return "", [(str(key), each) for key, each in value.items()]
            return None
        kind = type(value)
        if isinstance(value, functools.partial):
            parts = [("func", value.func), *((str(i), each) for i, each in enumerate(value.args))]
            return "partial", [*parts, *value.keywords.items()]
        if isinstance(value, FunctionType):
            return f"function {_name(value)}", list(_of_function(value))
        if isinstance(value, MethodType):
            return f"method {_name(value)}", [("self", value.__self__), ("func", value.__func__)]
        if isinstance(value, nn.Module) and id(value) not in self._known:
            # Hidden in a list or a tuple; its weights are nobody's.
            tensors = (*value.named_parameters(), *value.named_buffers())
            names = {f"values of {n}": m for n, m in value.named_modules() if n}
            return kind.__qualname__, [*((n, t.detach()) for n, t in tensors), *names.items()]
        if _is_plain(value) or _is_handle(kind) or isinstance(value, nn.Module | torch.Generator):
            return None
        held = _attributes(value)
        self.kinds.add(kind)
        return (kind.__qualname__, sorted(held.items())) if held else None

    # ------------------------------------------------------------- texts

    def _text(self, value: Any, depth: int) -> str:
        """The same in every process; ``_SKIP`` for what is not compared, ``_UNKNOWN`` for none."""
        if value is None or isinstance(value, bool):
            return str(value)
        if isinstance(value, int | float):
            return _SKIP if _is_of_process(value) else _number(value)
        if isinstance(value, str | PurePath):
            return str(value)
        if isinstance(value, Tensor):
            return _SKIP if id(value) in self._known else self._of_tensor(value)
        if isinstance(value, np.ndarray):
            return self._of_array(value)
        if isinstance(value, list | tuple | deque):
            return f"[{', '.join(self._items(value, depth))}]"
        if isinstance(value, Mapping):
            pairs = (item for pair in value.items() for item in pair)
            return f"{{{', '.join(self._items(pairs, depth))}}}"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(self._items(value, depth)))}}}"
        return self._of_object(value, depth)

    def _items(self, values: Any, depth: int) -> Iterator[str]:
        if depth >= _DEPTH:
            return
        for place, value in enumerate(values):
            self._left -= 1
            if place % _SAMPLE == 0 and time.perf_counter() > self._until:
                self.cut = True
                return
            if self._left < 0 and place >= _SAMPLE:
                yield f"of {len(values)}" if hasattr(values, "__len__") else "..."
                return
            yield self._text(value, depth + 1)

    def _of_object(self, value: Any, depth: int) -> str:
        """Of what is no number, text, tensor or container."""
        kind = type(value)
        if isinstance(value, type | ModuleType | BuiltinFunctionType):
            return _name(value)
        if isinstance(value, enum.Enum):
            return f"{kind.__qualname__}.{value.name}"
        if isinstance(value, torch.device):
            return value.type  # Its number is the rank's.
        if isinstance(value, torch.Generator):
            return f"a generator {_hashed(value.get_state().numpy())}"
        if isinstance(value, np.random.Generator):
            return self._text(value.bit_generator.state, depth + 1)
        if isinstance(value, np.random.RandomState):
            return self._text(value.get_state(), depth + 1)
        if isinstance(value, random.Random):
            return f"a generator {_hashed(repr(value.getstate()).encode())}"
        if _is_handle(kind) or isinstance(value, datetime.datetime):
            return _SKIP
        if id(value) in self._known or depth >= _DEPTH:
            return kind.__qualname__
        inside = self._inside(value)
        if inside is not None:
            self._known[id(value)] = value
            parts = (item for pair in inside[1] for item in pair)
            return f"{inside[0]}({', '.join(self._items(parts, depth))})"
        if isinstance(value, nn.Module):
            return kind.__qualname__
        text = repr(value)
        return _UNKNOWN if " at 0x" in text else text

    def _of_tensor(self, value: Tensor) -> str:
        shape = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if value.is_meta or value.layout != torch.strided or value.is_quantized:
            return shape
        if type(value) not in (Tensor, nn.Parameter):
            return shape
        flat = value.detach().reshape(-1)
        array = self._few(flat).cpu().contiguous()
        data = array.view(torch.uint8).numpy() if array.numel() else b""
        return f"{shape} {_listed(array[:_HEAD].tolist(), value.numel())} {_hashed(data)}"

    def _of_array(self, value: np.ndarray[Any, Any]) -> str:
        shape = f"{value.dtype} {list(value.shape)}"
        if value.dtype.hasobject:
            return f"{shape} [{', '.join(self._items(value.reshape(-1).tolist(), 1))}]"
        few = np.ascontiguousarray(self._few(value.reshape(-1)))
        return f"{shape} {_listed(few[:_HEAD].tolist(), value.size)} {_hashed(few.tobytes())}"

    def _few(self, flat: Any) -> Any:
        """All of it, or a sample where too much has been looked at already."""
        count = len(flat)
        self._left -= count
        return flat if self._left >= 0 else flat[:: max(1, count // _SAMPLE)]


_SKIP = "(not compared)"
_UNKNOWN = "(not known)"


def is_object(text: str) -> bool:
    """Whether an entry says no more than of which class something is."""
    return text.startswith(_OBJECT)


def is_own(module_name: str) -> bool:
    """Whether code is of the user's, not of an installed package."""
    top = module_name.partition(".")[0]
    if top in ("builtins", "lightning", "strategies", "launcher", "torch", "torchmetrics"):
        return False
    place = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return "site-packages" not in place and not place.startswith(os.path.dirname(os.__file__))


def _is_plain(value: Any) -> bool:
    plain = None | bool | int | float | complex | str | bytes | bytearray | type | ModuleType
    return isinstance(
        value,
        plain | Tensor | np.ndarray | np.generic | list | tuple | deque | set | frozenset | Mapping
        | enum.Enum | PurePath | torch.device | torch.dtype | random.Random
        | np.random.Generator | np.random.RandomState,
    )  # fmt: skip


def _is_handle(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] in _HANDLES for base in kind.__mro__)


def _attributes(value: Any) -> dict[str, Any]:
    held = dict(getattr(value, "__dict__", None) or {})
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                held.setdefault(name, getattr(value, name))
    return held


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function has besides its code: defaults, and the cells of its closure."""
    for number, value in enumerate(function.__defaults__ or ()):
        yield f"default {number}", value
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _name(value: Any) -> str:
    """Of a class, function or module; functions without a name have their line."""
    name = str(getattr(value, "__qualname__", "") or getattr(value, "__name__", ""))
    name = name or type(value).__qualname__
    code: Any = getattr(value, "__code__", None)
    return f"{name} of line {code.co_firstlineno}" if "<lambda>" in name and code else name


_CLOCKS: tuple[Callable[[], float], ...] = (time.time, time.monotonic, time.perf_counter)


_ADDRESSES = range(2**40, 2**48)


def _is_of_process(value: float) -> bool:
    """Whether a number is a time, an address, or the number of this process."""
    if isinstance(value, int) and (value == os.getpid() or value in _ADDRESSES):
        return True
    return value > _CLOCK_S and any(abs(value - clock()) < _CLOCK_S for clock in _CLOCKS)


def _number(value: float) -> str:
    return repr(float(value)) if isinstance(value, float) else repr(int(value))


def _listed(first: list[Any], count: int) -> str:
    shown = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in first)
    return f"[{shown}{', ...' if count > len(first) else ''}]"


def _short(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:_LONG]}... {_hashed(text.encode(errors='replace'))}"


def _hashed(data: Any) -> str:
    return f"#{zlib.crc32(data):08x}"
