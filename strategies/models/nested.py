"""Nested containers: visiting, rebuilding and comparing what layers and steps pass around."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from strategies.errors import ModelError
from strategies.models.replay.hole import Hole

_ABSENT = object()
# By type most values are known at once: asking for abstract classes takes microseconds each.
_ATOMS = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
    | {torch.memory_format, torch.layout}
)
_PLAIN = (*_ATOMS, Enum)
_LISTS = (list, tuple)
_DICTS = (dict, UserDict)


def leaves(value: Any) -> Iterator[Any]:
    """All leaves of nested tuples, lists, dicts and dataclasses, in a fixed order."""
    found: list[Any] = []
    _gather(value, found)
    return iter(found)


def _gather(value: Any, found: list[Any]) -> None:
    if type(value) in _ATOMS or isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, _LISTS):
        for item in value:
            _gather(item, found)
    elif isinstance(value, _DICTS):
        for item in value.values():
            _gather(item, found)
    elif _is_record(value):
        for field in dataclasses.fields(value):
            _gather(getattr(value, field.name, None), found)
    else:
        found.append(value)


def tensors(value: Any) -> list[Tensor]:
    """The tensors among ``leaves``; the same one may occur several times."""
    if isinstance(value, Tensor):
        return [value]
    if value is None:
        return []
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of the containers of ``value`` whose leaves went through ``leaf``."""
    if type(value) in _ATOMS or isinstance(value, Tensor):
        return leaf(value)
    if isinstance(value, _LISTS):
        items = [rebuild(item, leaf) for item in value]
        kind: Any = type(value)
        if kind is list:
            return items
        if hasattr(value, "_fields"):
            return kind._make(items)  # PackedSequence looks at what it is given
        return value if isinstance(value, torch.Size) else kind(items)
    if isinstance(value, _DICTS):
        if type(value) is dict:
            return {key: rebuild(item, leaf) for key, item in value.items()}
        mapping: Any = copy.copy(value)
        for key, item in value.items():
            mapping[key] = rebuild(item, leaf)
        return mapping
    if _is_record(value):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                # Frozen records too: this is a fresh copy that nobody else has seen.
                changed = rebuild(getattr(value, field.name), leaf)
                object.__setattr__(record, field.name, changed)
        return record
    return leaf(value)


def cloned(value: Any) -> Any:
    """A copy with tensors of its own, for who may write into them."""
    return rebuild(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


@contextmanager
def replaced(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Inside, tables have these values for keys; each is put in before the next is asked for."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for table, key, value in entries:
            before.append((table, key, table.get(key, _ABSENT)))
            table[key] = value
        yield
    finally:
        for table, key, value in reversed(before):
            if value is _ABSENT:
                table.pop(key, None)
            else:
                table[key] = value


def signature(value: Any) -> Hashable:
    """What decides shapes: two calls of equal signature give results of equal description."""
    if type(value) in _ATOMS:
        return (type(value), value)
    if isinstance(value, Hole):
        return value.spec
    if isinstance(value, Tensor):
        kind = "parameter" if isinstance(value, nn.Parameter) else "real"
        return (kind, value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, PackedSequence) and not isinstance(value.batch_sizes, Hole):
        rows = int(value.batch_sizes[0])  # of the last states
        return (PackedSequence, rows, *(signature(item) for item in value))
    if isinstance(value, list | tuple):
        return (type(value), *(signature(item) for item in value))
    if isinstance(value, dict | UserDict):
        return (type(value), *((key, signature(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, *(signature(end) for end in (value.start, value.stop, value.step)))
    if _is_record(value):
        names = (field.name for field in dataclasses.fields(value))
        return (type(value), *(signature(getattr(value, name, None)) for name in names))
    return cast(Hashable, type(value))


def structure(value: Any, *, inside: bool = False) -> Hashable:
    """Containers, keys and types of leaves: batches of equal structure take one path in a step.

    How many equal entries a list inside of a batch has may be its number of rows, and does not
    count.
    """
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, list | tuple):
        items = tuple(structure(item, inside=True) for item in value) if tensors(value) else ()
        return (type(value).__name__, *(set(items) if inside and len(set(items)) == 1 else items))
    if isinstance(value, dict | UserDict):
        pairs = ((str(key), structure(item, inside=True)) for key, item in value.items())
        return (type(value).__name__, *pairs)
    if _is_record(value):
        names = (field.name for field in dataclasses.fields(value))
        pairs = ((name, structure(getattr(value, name, None), inside=True)) for name in names)
        return (type(value).__name__, *pairs)
    return type(value).__name__


def join_parts(parts: Sequence[Tensor], shares: Sequence[float], shape: tuple[int, ...]) -> Tensor:
    """Microbatches' tensors as the whole batch's, of ``shape``.

    They are joined along the dimension in which they are shorter; where none is (a loss on the
    way, a table of positions), their mean by shares counts, or the first one's word.

    Raises:
        ModelError: Their shapes do not add up to it.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if all(tuple(part.shape) == tuple(shape) for part in parts):
        if first.is_floating_point() or first.is_complex():
            return sum(
                (part * share for part, share in zip(parts[1:], shares[1:], strict=True)),
                first * shares[0],
            )
        return first
    for dim in range(first.dim()):
        total = sum(part.shape[dim] for part in parts if part.dim() == first.dim())
        rest = [tuple(p.shape[:dim]) + tuple(p.shape[dim + 1 :]) for p in parts]
        wanted = tuple(shape[:dim]) + tuple(shape[dim + 1 :])
        if total == shape[dim] and all(other == wanted for other in rest):
            return torch.cat(list(parts), dim)
    shapes = [str(list(part.shape)) for part in parts]
    raise ModelError(
        f"what the last layer gives for microbatches ({', '.join(shapes)}) does not add up to what "
        f"it gives for the batch ({list(shape)})."
    )


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a number, string or the like, which has no identity of its own."""
    return isinstance(leaf, _PLAIN)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
