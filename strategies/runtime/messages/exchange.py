"""What ranks tell each other besides tensors of a known shape: plain data, never a pickle.

Whoever unpickles what another process has sent runs whatever code that one likes, and under
torchrun or SLURM anybody who takes a missing rank's place is such a process. So objects travel as
JSON with the bytes of their tensors and arrays behind it, and what neither can say is refused by
all ranks.
A class is never imported because somebody has named it, and nothing of it is called.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from strategies.errors import ModelError, RunError

_TAG = "__kind__"
_REFUSED = "__refused__"
_ALIGNMENT = 16
_LENGTH_BYTES = 8
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


class Exchange:
    """Collective calls, made by all ranks in the same order: words between them.

    Tensors that were on an accelerator arrive on ``device``, all others in host memory.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, device: torch.device | None = None
    ) -> None:
        """Args: group: The ranks that talk; None for a single process."""
        self._group = group
        self._device = device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def everyone(self, payload: Any) -> list[Any]:
        """What each rank has said, on all of them.

        Raises:
            ModelError: Some rank's payload is an object that cannot travel. All ranks raise.
        """
        if self._group is None:
            return [payload]
        own, lengths = self._frame(payload)
        found = [torch.empty_like(own) for _ in lengths]
        dist.all_gather(found, own, group=self._group)
        return self._heard(found, lengths)

    def first_hears(self, payload: Any) -> list[Any]:
        """What each rank has said, on rank 0; an empty list on the others."""
        if self._group is None:
            return [payload]
        own, lengths = self._frame(payload)
        if self.rank > 0:
            dist.gather(own, group=self._group, group_dst=0)
            return []
        found = [torch.empty_like(own) for _ in lengths]
        dist.gather(own, found, group=self._group, group_dst=0)
        return self._heard(found, lengths)

    def first_says(self, payload: Any) -> Any:
        return self.says(payload, source=0)

    def says(self, payload: Any, *, source: int) -> Any:
        """What one member of the group has said, on all of them.

        Raises:
            ModelError: It is an object that cannot travel. All ranks raise.
        """
        if self._group is None:
            return payload
        place = _place(self._group)
        speaks = self.rank == source
        data = _packed(payload).to(place) if speaks else torch.empty(0)
        length = torch.tensor(data.numel() if speaks else 0, device=place)
        dist.broadcast(length, group=self._group, group_src=source)
        size = int(length)
        if not speaks:
            if size == 0:
                return payload  # The group knows shapes only, and has sent nothing.
            data = torch.empty(size, dtype=torch.uint8, device=place)
        dist.broadcast(data, group=self._group, group_src=source)
        return payload if speaks else self._decoded(data.cpu())

    def _frame(self, payload: Any) -> tuple[Tensor, list[int]]:
        assert self._group is not None
        place = _place(self._group)
        data = _packed(payload)
        counts = [torch.zeros((), dtype=torch.int64, device=place) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor(data.numel(), device=place), group=self._group)
        lengths = [int(count) for count in counts]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: data.numel()] = data
        return padded.to(place), lengths

    def _heard(self, found: list[Tensor], lengths: list[int]) -> list[Any]:
        return [
            self._decoded(item[:length].cpu()) for item, length in zip(found, lengths, strict=True)
        ]

    def _decoded(self, data: Tensor) -> Any:
        return unpack(data, device=self._device)


def everybody(device: torch.device | None = None) -> Exchange:
    """Words between all processes; not at the same time as other talk in the default group."""
    return Exchange(dist.group.WORLD if dist.is_initialized() else None, device=device)


def _place(group: dist.ProcessGroup) -> torch.device:
    """Where the group's messages have to be."""
    return torch.device(distributed_c10d._get_object_coll_device(group))


def _packed(payload: Any) -> Tensor:
    """The message; where there is none, why, which all who hear it raise."""
    try:
        return pack(payload)
    except ModelError as error:
        return pack({_REFUSED: str(error)})


# ---------------------------------------------------------------------------------------- messages
# Eight bytes with the length of the JSON, the JSON, and behind it the bytes that it speaks of, each
# where every type is aligned.


def pack(payload: Any) -> Tensor:
    """The bytes that say it.

    Raises:
        ModelError: It is, or holds, an object that is no plain data.
    """
    blobs: list[Tensor] = []
    try:
        tree = _encode(payload, blobs)
        text = json.dumps({"value": tree, "sizes": [blob.numel() for blob in blobs]}).encode()
    except (RecursionError, ValueError) as error:
        raise ModelError(
            f"a {type(payload).__name__} cannot be sent to the other ranks: {error}."
        ) from None
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    parts = [_as_bytes(len(text).to_bytes(_LENGTH_BYTES, "little") + text)]
    for blob in blobs:
        parts += [blob, torch.zeros(-blob.numel() % _ALIGNMENT, dtype=torch.uint8)]
    return torch.cat(parts)


def unpack(data: Tensor, *, device: torch.device | None = None) -> Any:
    """What ``pack`` was given; tensors that were on an accelerator go to ``device``.

    Raises:
        RunError: These bytes say nothing: another program has taken a rank's place.
        ModelError: The sender had something to say that cannot travel.
    """
    try:
        raw = data.numpy()
        start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES].tobytes(), "little")
        message = json.loads(raw[_LENGTH_BYTES:start].tobytes())
        blobs: list[Tensor] = []
        for size in message["sizes"]:
            blobs.append(data[start : start + size].clone())
            if size < 0 or blobs[-1].numel() != size:
                raise ValueError("it is cut")
            start += size + -size % _ALIGNMENT
        found = _Decoder(blobs, device).decode(message["value"])
    except (
        ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        raise RunError(
            f"what another rank has sent is no message of this program ({type(error).__name__}: "
            f"{str(error)[:80]}), and nothing of it was used. Look whether another process has "
            "taken a rank's place at the address where the ranks meet."
        ) from None
    if isinstance(found, dict) and found.keys() == {_REFUSED}:
        raise ModelError(str(found[_REFUSED]))
    return found


def _encode(value: Any, blobs: list[Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(item, blobs) for key, item in value.items()}
    if kind is list:
        return [_encode(item, blobs) for item in value]
    for types, name, take in _KINDS:
        if isinstance(value, types):
            return {_TAG: name, "value": take(value, blobs)}
    if isinstance(value, tuple):
        items = [_encode(item, blobs) for item in value]
        if hasattr(kind, "_fields"):
            return {_TAG: "named", "value": [_name_of(kind), items]}
        return {_TAG: "tuple", "value": items}
    if isinstance(value, dict):  # Those of transformers are ordered dicts and dataclasses at once.
        pairs = [[_encode(key, blobs), _encode(item, blobs)] for key, item in value.items()]
        name = "dict" if kind is dict else _name_of(kind)
        return {_TAG: "dict", "value": [name, pairs]}
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: _encode(getattr(value, field.name), blobs) for field in fields(value)}
        return {_TAG: "data", "value": [_name_of(kind), held]}
    raise _no_message(kind)


def _no_message(kind: type) -> ModelError:
    return ModelError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the other ranks: tensors, "
        "NumPy arrays, numbers, text, lists, tuples, sets, dicts, named tuples and dataclasses can "
        "(nothing is ever unpickled). Return its contents as these, e.g. as a dict."
    )


def _name_of(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise ModelError(
            f"a {kind.__qualname__} cannot be sent to the other ranks: its class is made inside a "
            "function, where no other rank finds it. Define it at the top of its module."
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _tensor(value: Tensor, blobs: list[Tensor]) -> Any:
    if isinstance(value, DTensor) or value.layout != torch.strided or value.is_quantized:
        raise _no_message(type(value))
    plain = value.detach().resolve_conj().resolve_neg()
    host = plain.cpu().contiguous()
    blobs.append(host.reshape(-1).view(torch.uint8))
    return [str(value.dtype), list(value.shape), len(blobs) - 1, value.device.type == "cpu"]


def _array(value: np.ndarray[Any, Any] | np.generic, blobs: list[Tensor]) -> Any:
    if value.dtype.hasobject or value.dtype.names is not None:
        raise _no_message(type(value))
    blobs.append(_as_bytes(value.tobytes()))
    return [value.dtype.str, list(value.shape), len(blobs) - 1, isinstance(value, np.generic)]


def _bytes(value: bytes, blobs: list[Tensor]) -> int:
    blobs.append(_as_bytes(value))
    return len(blobs) - 1


def _as_bytes(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


_KINDS: tuple[tuple[Any, str, Callable[[Any, list[Tensor]], Any]], ...] = (
    (Tensor, "tensor", _tensor),
    (np.ndarray | np.generic, "array", _array),
    (bytes, "bytes", _bytes),
    (torch.Size, "size", lambda value, _: list(value)),
    (torch.dtype, "dtype", lambda value, _: str(value)),
    (torch.device, "device", lambda value, _: str(value)),
    (PurePath, "path", lambda value, _: str(value)),
    (complex, "complex", lambda value, _: [value.real, value.imag]),
    (frozenset, "frozenset", lambda value, blobs: [_encode(item, blobs) for item in value]),
    (set, "set", lambda value, blobs: [_encode(item, blobs) for item in value]),
    # Of classes that are these in all but name.
    (bool, "same", lambda value, _: bool(value)),
    (int, "same", lambda value, _: int(value)),
    (float, "same", lambda value, _: float(value)),
    (str, "same", lambda value, _: str.__str__(value)),
)


class _Decoder:
    def __init__(self, blobs: list[Tensor], device: torch.device | None) -> None:
        self._blobs = blobs
        self._device = device
        self._kinds: dict[str, Callable[[Any], Any]] = {
            "tensor": self._tensor,
            "array": self._array,
            "bytes": lambda index: self._blobs[index].numpy().tobytes(),
            "size": torch.Size,
            "dtype": _DTYPES.__getitem__,
            "device": torch.device,
            "path": Path,
            "complex": lambda parts: complex(*parts),
            "frozenset": lambda items: frozenset(map(self.decode, items)),
            "set": lambda items: set(map(self.decode, items)),
            "same": lambda value: value,
            "tuple": lambda items: tuple(map(self.decode, items)),
            "named": self._named,
            "dict": self._dict,
            "data": self._data,
        }

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if _TAG not in tree:
            return {key: self.decode(item) for key, item in tree.items()}
        return self._kinds[tree[_TAG]](tree["value"])

    def _tensor(self, said: Any) -> Tensor:
        dtype, shape, index, on_host = said
        found: Tensor = self._blobs[index].view(_DTYPES[dtype]).reshape(shape)
        return found if on_host or self._device is None else found.to(self._device)

    def _array(self, said: Any) -> Any:
        name, shape, index, scalar = said
        dtype = np.dtype(str(name))
        if dtype.hasobject:
            raise TypeError("an array of objects")
        data = self._blobs[index].numpy().tobytes()
        if len(data) != dtype.itemsize * math.prod(shape):
            raise ValueError("an array of another size")
        found = np.frombuffer(bytearray(data), dtype).reshape(shape)
        return found[()] if scalar else found

    def _dict(self, said: Any) -> dict[Any, Any]:
        name, pairs = said
        found = {self.decode(key): self.decode(item) for key, item in pairs}
        if name == "dict":
            return found
        kind = _class_of(name)
        plain = next(
            (base for base in kind.__mro__ if base in (OrderedDict, defaultdict, dict)), None
        )
        if plain is None:
            raise TypeError(f"{name} is no such dict")
        made: dict[Any, Any] = plain.__new__(kind)
        for key, item in found.items():
            plain.__setitem__(made, key, item)
        for field in fields(kind) if is_dataclass(kind) else ():
            object.__setattr__(made, field.name, found.get(field.name))
        return made

    def _named(self, said: Any) -> Any:
        kind, items = _class_of(said[0]), said[1]
        if not issubclass(kind, tuple) or len(kind._fields) != len(items):  # type: ignore[attr-defined]
            raise TypeError(f"{said[0]} is no such tuple")
        return tuple.__new__(kind, map(self.decode, items))

    def _data(self, said: Any) -> Any:
        kind, held = _class_of(said[0]), said[1]
        if not is_dataclass(kind) or held.keys() != {field.name for field in fields(kind)}:
            raise TypeError(f"{said[0]} is no such dataclass")
        made = object.__new__(kind)
        for name, item in held.items():
            object.__setattr__(made, name, self.decode(item))
        return made


def _class_of(name: str) -> type:
    """A class that this process knows already."""
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = vars(found)[part]
    if not isinstance(found, type):
        raise TypeError(f"{name} is no class")
    return found
