"""What must be known about a type of node to compute its weight gradients outside the engine."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from strategies.models.selective.region import Computed, Kept
from strategies.models.split_backward.autograd_graph import Kind, Node
from strategies.models.tensor_parallel.regions import Gathered


@dataclass(slots=True)
class Saved:
    """What a node saved that the gradients of some of its edges need, by torch's names.

    Attributes:
        settings: Values that are not tensors.
        shapes: Edge -> shape of the gradient that belongs there, for the rule's shaped edges.
        flipped: Edges whose operand is a turned matrix: its gradient is best computed the other
            way round, as torch does.
        gathered: Names of tensors of which ``tensors`` has this rank's share; see ``complete``.
    """

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    shapes: Mapping[int, torch.Size]
    flipped: Sequence[int]
    gathered: Mapping[str, Gathered] = field(default_factory=dict)

    def complete(self) -> Saved:
        """With all tensors whole; ranks that share them gather them."""
        if not self.gathered:
            return self
        whole = {name: packed.whole() for name, packed in self.gathered.items()}
        return Saved({**self.tensors, **whole}, self.settings, self.shapes, self.flipped)


@dataclass(slots=True)
class Product:
    """A gradient that is ``scale * left @ right``."""

    left: Tensor
    right: Tensor
    scale: Any

    def turned(self) -> Product:
        return Product(self.right.mT, self.left.mT, self.scale)

    def value(self) -> Tensor:
        result = self.left @ self.right
        return result if self.scale == 1 else result * self.scale


@dataclass(frozen=True, slots=True)
class Sample:
    """A small use of an operation, to compare its rule with torch."""

    output: Tensor
    leaves: Mapping[int, Tensor]


Gradients = Callable[[Saved, Tensor, Sequence[int]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """How to compute the weight gradients of one type of node.

    Attributes:
        node: The type's name in torch.
        factors: The edges of the operands whose product is heavy, data and weights.
        operands: Edge -> names of the saved tensors that its gradient needs; for the edges that
            may lead to a heavy weight.
        weight: The edge that leads to the weight where nothing else tells.
        bias: The edge of an addend, whose gradient needs no saved tensor.
        shaped: Edges whose gradient's shape the rule must know.
        settings: Names of the saved values that are not tensors.
        takes_data: False where the data operand has no gradient, as an embedding's indices.
        accepts: Whether the rule holds for a node.
        gradients: Saved values, incoming gradient, edges -> their gradients, new tensors.
        product: The same for one edge as factors; None where it is no matrix product.
        samples: Device -> uses of the operation for the comparison with torch.
        watches_hooks: False where torch does not say whether saved tensors are packed.
    """

    node: str
    factors: tuple[int, ...]
    operands: Mapping[int, tuple[str, ...]]
    weight: int
    gradients: Gradients
    samples: Callable[[torch.device], Sequence[Sample]]
    bias: int | None = None
    shaped: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()
    takes_data: bool = True
    accepts: Callable[[Any], bool] = lambda _: True
    product: Callable[[Saved, Tensor, int], Product] | None = None
    watches_hooks: bool = True


def summed_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of what was broadcast, a new tensor."""
    if gradient.shape == shape:
        return gradient.clone()
    if gradient.shape[1:] == shape:
        return gradient.sum(0)
    return gradient.sum_to_size(shape)


def example(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf with values of its own, without the generator that the model draws from."""
    size = int(torch.Size(shape).numel())
    values = torch.sin(torch.arange(1.0, size + 1, device=device) * 1.7).reshape(shape)
    return values.to(dtype).requires_grad_()


# -- adds gradients to ``.grad`` as torch's accumulation does: in place where there is one ---------


def add_gradient(leaf: Tensor, gradient: Tensor) -> None:
    """Adds a gradient of the leaf's shape that nobody else refers to."""
    present = leaf.grad
    if present is None:
        leaf.grad = _as_torch_lays_it_out(leaf, gradient)
    elif present.layout is torch.strided:
        present.add_(gradient)
    else:
        leaf.grad = gradient + present


def add_product(leaf: Tensor, product: Product) -> None:
    """Adds a product, where torch can in one call: rounded once less, and without its memory."""
    present = leaf.grad
    if (
        present is None
        or type(present) is not Tensor
        or present.layout is not torch.strided
        or not present.dtype == product.left.dtype == product.right.dtype
    ):
        add_gradient(leaf, product.value())
    elif present.dim() == 2:
        present.addmm_(product.left, product.right, alpha=product.scale)
    else:
        present.baddbmm_(product.left, product.right, alpha=product.scale)


def _as_torch_lays_it_out(leaf: Tensor, gradient: Tensor) -> Tensor:
    # A parameter may want its gradients in another type, or (None) in whatever type they come.
    dtype = leaf.grad_dtype
    if dtype is not None:
        gradient = gradient.to(dtype)
    if gradient.stride() == leaf.stride() and gradient._base is None:
        return gradient
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


# -- reads what a node saved, and tells whether that can be read before the engine does ------------

# Private to torch, and the only sign that a packed tensor belongs to a checkpointed region.
_Holder: Any = getattr(checkpoint, "_Holder", None)


class Access(enum.Enum):
    """When a node's saved tensors may be read.

    Attributes:
        NOW: They are there.
        LATER: A checkpoint computes them again when the engine comes to the node.
        NEVER: Somebody packed them in a way of his own (off to the CPU, compressed).
    """

    NOW = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


def access_of(node: Node, names: Sequence[str]) -> Access:
    """How the named saved tensors can be read; prepares checkpointed ones to be read twice."""
    holders = []
    later = False
    for name in names:
        raw = getattr(node, "_raw_saved_" + name)
        if raw.unpack_hook is None or type(packed := raw.data) is Kept:
            continue
        if type(packed) is Gathered and type(packed := packed.packed_share) is Kept:
            continue
        if type(packed) is Computed:
            later = True
        elif _Holder is not None and type(packed) is _Holder:
            holders.append(packed)
        else:
            return Access.NEVER
    for holder in holders:
        if type(holder.handles) is not _KeptHandles:
            holder.handles = _KeptHandles(holder.handles)
    return Access.LATER if holders or later else Access.NOW


class _KeptHandles(dict[int, Any]):
    """Handles of a checkpoint's saved tensor that stay when the tensor has been unpacked.

    A checkpoint gives a tensor out once per backward and forgets it. Here it is needed twice: for
    the input gradient inside the engine, and before that to keep it for the weight gradient. It
    still goes with the node's saved values, which the engine frees as soon as the node has run.
    """

    def __setitem__(self, task: int, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(task, handle)


@functools.cache
def _raw_names(kind: Kind) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def packs(node: Node) -> bool:
    """Whether hooks pack any of the tensors that the node saved."""
    kind: Kind = type(node)
    for name in _raw_names(kind):
        raw = getattr(node, name)
        for saved in raw if isinstance(raw, tuple) else (raw,):
            if saved is not None and saved.unpack_hook is not None:
                return True
    return False


def read_saved(
    node: Node,
    rule: Rule,
    names: Sequence[str],
    *,
    shapes: Mapping[int, torch.Size],
    flipped: Sequence[int],
) -> Saved:
    tensors: dict[str, Tensor] = {}
    gathered: dict[str, Gathered] = {}
    for name in names:
        raw = getattr(node, "_raw_saved_" + name)
        packed = None if raw.unpack_hook is None else raw.data
        if type(packed) is Gathered:
            gathered[name] = packed
            tensors[name] = packed.share()
        else:
            # With its history a tensor would keep the graph's nodes, and those the stage's inputs.
            tensors[name] = getattr(node, "_saved_" + name).detach()
    settings = {name: signed(getattr(node, name)) for name in rule.settings}
    return Saved(tensors, settings, shapes, flipped, gathered)


def awaits_weights(node: Node, names: Sequence[str]) -> None:
    """Says of a node's operands that the engine itself has no use for their values."""
    for name in names:
        raw = getattr(node, "_raw_saved_" + name)
        packed = None if raw.unpack_hook is None else raw.data
        if type(packed) is Gathered:
            packed.waits = True


def signed(value: Any) -> Any:
    """A saved value as it was: torch hands negative integers out as unsigned ones."""
    return value - (1 << 64) if type(value) is int and value >= 1 << 63 else value


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a real dense one: no subclass, no other layout."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_complex()
    )
