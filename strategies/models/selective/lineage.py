"""Names tensors by how they came about, so that the second run of a layer knows the first one's.

A name depends on the operation, on its arguments' names and on nothing else. What one run does and
the other does not (filling a cache, casting a weight that has been cast since) changes the names of
what follows from it, and of nothing else; a tensor whose name is unknown is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor

from strategies.models.nested import leaves, tensors
from strategies.plan import Family

# torch does not say that they write to what they are given.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})


class Lineage:
    """Follows one run from what it is given; other tensors that it meets go by their memory."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        self._names = {storage_of(t): hash(("given", i)) for i, t in enumerate(given)}
        self._uses: dict[int, int] = {}

    def name(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """The name of an operation's use. Uses of equal arguments are told apart by their order."""
        name = hash((operation, *map(self._described, leaves((args, kwargs)))))
        count = self._uses.get(name, 0)
        self._uses[name] = count + 1
        return hash((name, count))

    def note(self, name: int, changed: Iterable[Tensor]) -> None:
        for index, tensor in enumerate(changed):
            self._names[storage_of(tensor)] = hash((name, index))

    def _described(self, leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            storage = storage_of(leaf)
            if not storage:
                return id(leaf)
            place = (leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype)
            return (self._names.get(storage, storage), *place)
        return leaf if isinstance(leaf, Hashable) else type(leaf).__name__


@functools.cache
def makes_new(operation: Any) -> bool:
    """Whether an operation changes nothing and gives tensors of its own."""
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return True
    if operation.namespace in _COLLECTIVES:
        return False
    return not (schema.is_mutable or operation.is_view)


def written(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    if operation.namespace in _COLLECTIVES:
        return tensors((args, kwargs))
    places = _written_places(operation)
    found = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
    return tensors(found)


@functools.cache
def _written_places(operation: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def storage_of(tensor: Tensor) -> int:
    """A number for the memory behind a tensor; 0 for those that have none of their own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


# -- families: which kind of work an operation does, told by its name -----------------------------

# Products with weights. Those of batches of matrices are mostly an attention's: see below.
_PRODUCTS = """
    mm addmm _addmm_activation linear mkldnn_linear convolution convolution_overrideable
    _convolution cudnn_convolution mkldnn_convolution _grouped_mm _scaled_mm _scaled_grouped_mm
"""
_MATMUL = frozenset(_PRODUCTS.split())
_ATTENTION = frozenset({"bmm", "baddbmm", "_softmax", "_safe_softmax"})
# Those that torch takes apart on some devices end with these.
_NORM = frozenset({"rsqrt", "var", "var_mean"})


@functools.cache
def family_of(operation: Any) -> Family:
    """The family of an operation of the dispatcher; ``activation`` for all that is cheap.

    >>> import torch
    >>> family_of(torch.ops.aten.addmm.default), family_of(torch.ops.aten.gelu.default)
    ('matmul', 'activation')
    """
    packet = getattr(operation, "overloadpacket", operation)
    name = str(getattr(packet, "__name__", packet))
    if name in _MATMUL:
        return "matmul"
    if name in _ATTENTION or "attention" in name:
        return "attention"
    if name in _NORM or "_norm" in name:
        return "norm"
    return "activation"
