"""Values of which a rank has a share of each of several parts: queries, keys and values, say.

One matrix makes them, so its outputs are equal parts side by side, each of which is cut. The code
between layers takes such a value apart at once: it splits it, or views it with the parts as a
dimension of their own. That is done here on what a rank has; what is left is a share like any
other. Whatever else is done with the value is done with all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

from strategies.models.replay.hole import Args, Function, Kwargs


class Segments(NamedTuple):
    """What a rank has of such a value.

    Attributes:
        local: Its shares of the parts, side by side; autograd goes through it.
        dim: Along which the parts lie, and each is cut.
        number: How many they are.
    """

    local: Tensor
    dim: int
    number: int


def segments_of(value: Any) -> Segments | None:
    """None for any other value."""
    found = value.__dict__.get(_ATTRIBUTE) if isinstance(value, DTensor) else None
    return found if isinstance(found, Segments) else None


def with_segments(share: Tensor, parts: Segments) -> Tensor:
    """Notes what a share consists of."""
    share.__dict__[_ATTRIBUTE] = parts
    return share


_ATTRIBUTE = "_side_by_side"


def placement(parts: Segments) -> Any:
    """The same in DTensor's words."""
    return _StridedShard(parts.dim, split_factor=parts.number)


def segments_after_view(
    before: Sequence[int], dim: int, count: int, ranks: int, after: Sequence[int]
) -> tuple[int, int] | None:
    """Dimension and number of parts in another shape, where a rank's share is one of it, too.

    >>> segments_after_view((2, 5, 48), 2, 3, 2, (2, 5, 3, 4, 4))
    (3, 1)
    >>> segments_after_view((2, 5, 48), 2, 3, 2, (10, 48))
    (1, 3)
    """
    left = math.prod(before[:dim]) * count  # Numbers of parts in front of the ranks' dimension.
    right = math.prod(before) // (left * ranks)
    outer = 1
    for place, size in enumerate(after):
        inner = math.prod(after[place + 1 :])
        parts, rest = divmod(left, outer)
        even = not rest and parts and size % (parts * ranks) == 0 and right % inner == 0
        if even and size // (parts * ranks) == right // inner:
            return place, parts
        outer *= size
    return None


# A rank's share of an operation's result: the share, its dimension, the whole's size there, parts.
_Left = tuple[Tensor, int, int, int]
Leave = Callable[[Tensor, int, int, int], Tensor]


def run_on_segments(func: Function, args: Args, kwargs: Kwargs, ranks: int, leave: Leave) -> Any:
    """An operation on a value of several parts; NotImplemented where it needs all of it.

    Args:
        func: What is called.
        args: The first of them is such a value.
        kwargs: Without any.
        ranks: That share.
        leave: Makes a share of a rank's part, its dimension, the whole's size there and the number
            of parts.
    """
    value = args[0] if args else None
    parts = segments_of(value)
    if parts is None or any(map(segments_of, (*args[1:], *kwargs.values()))):
        return NotImplemented
    assert isinstance(value, Tensor)
    name = getattr(func, "__name__", "")
    if name in _VIEWS:
        return _viewed(func, value, parts, args[1:], kwargs, ranks, leave)
    if name in _SPLITS:
        return _split(func, value, parts, args[1:], kwargs, ranks, leave)
    if name == "narrow" and len(args) == 4 and not kwargs:
        dim, start, length = args[1:]
        index = [slice(None)] * value.dim()
        index[dim] = slice(start, start + length)
        return _indexed(value, parts, tuple(index), ranks, leave)
    if name == "__getitem__" and len(args) == 2:
        return _indexed(value, parts, args[1], ranks, leave)
    if func is functional.glu and parts.number == 2:
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % value.dim()
        if dim == parts.dim:
            return leave(functional.glu(parts.local, dim), dim, value.shape[dim] // 2, 1)
    plain = not any(isinstance(leaf, Tensor) for leaf in (*args[1:], *kwargs.values()))
    if name in _IN_PLACE and plain:
        func(parts.local, *args[1:], **kwargs)
        return value
    if name in _ELEMENT_BY_ELEMENT and plain and kwargs.get("inplace") is not True:
        local = func(parts.local, *args[1:], **kwargs)
        return leave(local, parts.dim, value.shape[parts.dim], parts.number)
    return NotImplemented


_VIEWS = frozenset({"view", "reshape", "unflatten", "flatten", "unsqueeze"})
_SPLITS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split"})
_IN_PLACE = frozenset(
    ["mul_", "div_", "add_", "sub_", "__imul__", "__itruediv__", "__iadd__", "__isub__"]
)
_ELEMENT_BY_ELEMENT = frozenset(
    ["contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "type", "relu",
     "gelu", "silu", "sigmoid", "tanh", "neg", "mul", "div", "add", "sub", "__mul__", "__rmul__",
     "__truediv__", "__add__", "__sub__"]
)  # fmt: skip


def _viewed(
    func: Function,
    value: Tensor,
    parts: Segments,
    args: Args,
    kwargs: Kwargs,
    ranks: int,
    leave: Leave,
) -> Any:
    if args and isinstance(args[0], torch.dtype):
        return NotImplemented
    after = func(torch.empty(value.shape, device="meta"), *args, **kwargs).shape
    found = segments_after_view(value.shape, parts.dim, parts.number, ranks, after)
    if found is None:
        return NotImplemented
    dim, count = found
    own = list(after)
    own[dim] //= ranks
    return leave(parts.local.reshape(own), dim, after[dim], count)


def _split(
    func: Function,
    value: Tensor,
    parts: Segments,
    args: Args,
    kwargs: Kwargs,
    ranks: int,
    leave: Leave,
) -> Any:
    made = func(torch.empty(value.shape, device="meta"), *args, **kwargs)
    if any(each.shape[parts.dim] != value.shape[parts.dim] for each in made):
        index: list[Any] = [slice(None)] * value.dim()
        found, start = [], 0
        for each in made:
            stop = start + each.shape[parts.dim]
            index[parts.dim] = slice(start, stop)
            found.append(_indexed(value, parts, tuple(index), ranks, leave))
            start = stop
        return NotImplemented if any(each is NotImplemented for each in found) else tuple(found)
    split = func(parts.local, *args, **kwargs)
    return tuple(leave(each, parts.dim, value.shape[parts.dim], parts.number) for each in split)


def _indexed(value: Tensor, parts: Segments, index: Any, ranks: int, leave: Leave) -> Any:
    """By slices and numbers; along the dimension of the parts by whole parts."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(
        each is Ellipsis
        or type(each) is int
        or (isinstance(each, slice) and each.step in (None, 1))
        for each in entries
    ):
        return NotImplemented
    missing = value.dim() - sum(each is not Ellipsis for each in entries)
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    entries[at : at + 1] = [slice(None)] * missing
    chosen = entries[parts.dim]
    if not isinstance(chosen, slice):
        return NotImplemented
    size = value.shape[parts.dim]
    start, stop, _ = chosen.indices(size)
    part = size // parts.number
    if start % part or stop % part or stop <= start:
        return NotImplemented
    entries[parts.dim] = slice(start // ranks, stop // ranks)
    before = sum(type(each) is int for each in entries[: parts.dim])
    local = parts.local[tuple(entries)]
    return leave(local, parts.dim - before, stop - start, (stop - start) // part)
