"""FLOPs of everything that runs under a mode: two per multiply-add of products of tensors.

As ``torch.utils.flop_counter``, whose formulas are used, those a user has registered with
``register_flop_formula`` included. That counter takes an operation without a formula for nothing.
So does this one, where torch's own do no products; any other, say of an extension, is reported, and
counted as one operation per element that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from strategies.models.nested import tensors

# Products of torch's own that torch has no formula for: decompositions, solvers, transforms.
_PRODUCTS = ("linalg", "fft", "cholesky", "lu_", "geqrf", "ormqr", "orgqr", "triangular_solve")


def _scores(query: Tensor, key: Tensor) -> int:
    """Products of one number per query, key and head; heads of keys may serve several queries."""
    batch, heads, queries = prod(query.shape[:-3]), query.shape[-3], query.shape[-2]
    return 2 * batch * heads * queries * int(key.shape[-2])


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _scores(query, key) * (query.shape[-1] + value.shape[-1])


def _cpu_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    # The scores once more, then the gradients of weights, values, queries and keys.
    return _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _recurrent(inputs: Tensor, *weights: Any, **__: Any) -> int:
    """A layer's steps: every row through both of its matrices."""
    rows = inputs.numel() // int(inputs.shape[-1])
    return 2 * rows * sum(w.numel() for w in weights[:2] if isinstance(w, Tensor))


_Formula = Callable[..., Any]
_OWN: Mapping[str, _Formula] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    "mv": lambda matrix, *_, **__: 2 * matrix.numel(),
    "dot": lambda first, *_, **__: 2 * first.numel(),
    "vdot": lambda first, *_, **__: 2 * first.numel(),
    "addmv": lambda _, matrix, *__, **___: 2 * matrix.numel(),
    "addbmm": lambda _, a, b, *__, **___: 2 * a.numel() * int(b.shape[-1]),
    "addr": lambda _, a, b, *__, **___: 2 * a.numel() * b.numel(),
    "linear": lambda inputs, weight, *_, **__: 2 * inputs.numel() * int(weight.shape[0]),
    "_cdist_forward": lambda a, b, *_, **__: 2 * a.numel() * int(b.shape[-2]),
    # Rows of one matrix, each times the matrix of its group.
    "_grouped_mm": lambda a, b, *_, **__: 2 * a.numel() * int(b.shape[-1]),
    "mkldnn_rnn_layer": _recurrent,
    "_trilinear": lambda a, b, c, *_, out_val, **__: 4 * out_val.numel(),
}
_FORMULAS: dict[Any, _Formula] = {
    packet: formula
    for name, formula in _OWN.items()
    if (packet := getattr(torch.ops.aten, name, None)) is not None
}


def formula_of(packet: Any) -> _Formula | None:
    """Of an operation, all its overloads; a user's own comes first."""
    return flop_registry.get(packet) or _FORMULAS.get(packet)


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs under it.

    Attributes:
        unknown: Operations that were met without a formula.
        last: The operation that ran last, for messages.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.unknown: set[str] = set()
        self.last = "nothing"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", None)
        self.last = str(packet if packet is not None else func).replace(".", "::")
        result = func(*args, **kwargs)
        formula = formula_of(packet)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        elif (made := tensors(result)) and packet and not _without_products(packet):
            self.unknown.add(self.last)
            self.flops += sum(tensor.numel() for tensor in made)
        return result


def _without_products(packet: Any) -> bool:
    """Whether an operation without a formula is one of torch's that does none."""
    namespace, _, name = str(packet).rpartition(".")
    if namespace != "aten":
        return namespace.startswith(("prim", "profiler", "inductor_prims"))
    name = name.lstrip("_")
    return name == "linalg_vector_norm" or not name.startswith(_PRODUCTS)


class CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up cost from shapes; also notices whether random numbers were drawn.

    Attributes:
        cost: FLOPs of matrix products, convolutions and attention, plus one per element that
            any other operation writes.
        random: Set by every operation that draws random numbers; reset by whoever reads it.
        draws: How many have.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = 0.0
        self.random = False
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.random = True
            self.draws += 1
        if packet in flop_registry:
            self.cost += flop_registry[packet](*args, **kwargs, out_val=result)
        elif args and not getattr(func, "is_view", False) and packet is not torch.ops.aten.empty:
            self.cost += sum(tensor.numel() for tensor in tensors(result))
        return result
