"""Python values as JSON and bytes, and their way from one rank of a pipeline to the others.

What a step leaves on the last stage's rank is wanted on all: numbers, texts, tensors, and lists,
dicts and small objects of them. Nothing is ever unpickled, so what comes from another rank cannot
run code here.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import deque
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.errors import ModelError
from strategies.models.contents import MISSING, adapter_of, is_record
from strategies.models.replay.hole import Hole

_DEPTH = 8


class Parcel:
    """Values on their way: a tree for JSON, and the tensors that are too large for it.

    Args:
        inline_bytes: Tensors up to this size travel inside the tree.
    """

    def __init__(self, *, inline_bytes: int = 0) -> None:
        self.tensors: list[Tensor] = []
        self._inline_bytes = inline_bytes

    def pack(self, value: Any, depth: int = _DEPTH) -> Any:
        """The value as JSON takes it.

        Raises:
            TypeError: It has something in it that only its own rank can hold.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if depth == 0:
            raise TypeError("it is nested too deeply")
        if isinstance(value, dict):
            items = [[self.pack(k), self.pack(v, depth - 1)] for k, v in value.items()]
            return ["dict", items]
        for kind in (list, tuple, set, deque):
            if isinstance(value, kind) and not hasattr(value, "_fields"):
                return [kind.__name__, [self.pack(item, depth - 1) for item in value]]
        if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            array = torch.as_tensor(value)
            return ["array" if value.ndim else "number", self._tensor(array)]
        if is_record(value):
            how = adapter_of(value)
            assert how is not None
            items = [[k, self._item(v, depth - 1)] for k, v in how.items(how.read(value))]
            return ["record", type(value).__name__, items]
        if isinstance(value, Enum):
            return ["enum", type(value).__module__, type(value).__qualname__, value.name]
        if isinstance(value, torch.nn.Module) or callable(value):
            return ["kept", type(value).__name__]
        raise TypeError(f"an object of type {type(value).__name__} cannot be sent")

    def _item(self, value: Any, depth: int) -> Any:
        """Of an object: what cannot be sent is taken to be there already, and the same."""
        try:
            return self.pack(value, depth)
        except TypeError:
            if isinstance(value, Tensor | list | tuple | dict | set | deque):
                raise
            return ["kept", type(value).__name__]

    def _tensor(self, tensor: Tensor) -> Any:
        if isinstance(tensor, Hole):
            raise TypeError("it is a value of another stage, from before the last layer")
        tensor = tensor.detach()
        about = [str(tensor.dtype).partition(".")[2], list(tensor.shape), tensor.is_cuda]
        if tensor.numel() * tensor.element_size() <= self._inline_bytes:
            return ["tensor", *about, base64.b64encode(bytes(_raw(tensor).numpy())).decode()]
        self.tensors.append(tensor)
        return ["tensor", *about, None]


class Opening:
    """The other end: makes values of a tree, in order, out of what ``Parcel`` has packed."""

    def __init__(self, content: Tensor, device: torch.device) -> None:
        self._content = content
        self._device = device
        self._place = 0

    def unpack(self, tree: Any, onto: Any = MISSING) -> Any:
        """The value; a container or object that is there already is filled and returned.

        Raises:
            ModelError: It needs an object that this rank does not have.
        """
        if not isinstance(tree, list):
            return tree
        kind, *rest = tree
        if kind == "tensor":
            return self._tensor(*rest)
        if kind in ("array", "number"):
            array: Any = self._tensor(*rest[0][1:]).cpu().numpy()
            return array if kind == "array" else array[()]
        if kind == "dict":
            old = onto if isinstance(onto, dict) else {}
            filled: Any = {}
            for packed, item in rest[0]:
                key = self.unpack(packed)
                filled[key] = self.unpack(item, old.get(key, MISSING))
        elif kind == "enum":
            return _member(*rest)
        elif kind == "record":
            adapter = None if onto is MISSING else adapter_of(onto)
            if adapter is None or type(onto).__name__ != rest[0]:
                raise _missing(rest[0])
            now = dict(adapter.items(adapter.read(onto)))
            adapter.fill(onto, {k: self.unpack(v, now.get(k, MISSING)) for k, v in rest[1]})
            return onto
        elif kind == "kept":
            if onto is MISSING:
                raise _missing(rest[0])
            return onto
        else:
            there = list(onto) if isinstance(onto, list | tuple | deque) else []
            there += [MISSING] * (len(rest[0]) - len(there))
            filled = [
                self.unpack(i, o) for i, o in zip(rest[0], there[: len(rest[0])], strict=True)
            ]
            if kind != "list":
                filled = {"tuple": tuple, "set": set, "deque": deque}[kind](filled)
        if isinstance(onto, dict | list | set | deque):
            adapter = adapter_of(onto)
            assert adapter is not None
            adapter.fill(onto, filled)
            return onto
        return filled

    def _tensor(self, dtype: str, shape: list[int], cuda: bool, inline: str | None) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        if inline is None:
            size = kind.itemsize
            for length in shape:
                size *= length
            raw = self._content[self._place : self._place + size]
            self._place += size
        else:
            data = bytearray(base64.b64decode(inline)) or bytearray(1)
            raw = torch.frombuffer(data, dtype=torch.uint8)
            raw = raw if inline else raw[:0]
        # A tensor of its own, as it is where it was packed: a view is not written into by steps.
        made = raw.clone().view(kind).reshape(shape).clone()
        return made.to(self._device) if cuda else made


def _member(file: str, name: str, member: str) -> Any:
    """A member of an enumeration, by the names that it has on another rank."""
    found: Any = sys.modules.get(file)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise _missing(name)
    return found[member]


def hand_round(
    tree: Any, tensors: list[Tensor], *, group: dist.ProcessGroup, source: int
) -> tuple[Any, Tensor]:
    """Brings a packed value from one rank to all of a group; collective, over host memory.

    Returns the tree and the tensors' bytes.
    """
    sends = dist.get_rank() == source
    words = torch.zeros(0, dtype=torch.uint8)
    content = torch.zeros(0, dtype=torch.uint8)
    if sends:
        words = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
        if tensors:
            content = torch.cat([_raw(tensor) for tensor in tensors])
    sizes = torch.tensor([words.numel(), content.numel()])
    dist.broadcast(sizes, src=source, group=group)
    if not sends:
        words, content = (torch.empty(int(n), dtype=torch.uint8) for n in sizes)
    dist.broadcast(words, src=source, group=group)
    if content.numel():
        dist.broadcast(content, src=source, group=group)
    return json.loads(bytes(words.numpy())), content


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _missing(what: str) -> ModelError:
    return ModelError(
        f"a step keeps an object of type {what} on the module, which the ranks of other stages do "
        "not have and cannot be sent. Keep numbers, tensors, lists and dicts of them, or make the "
        "object in __init__."
    )
