"""What must be known about a type of node to compute its weight gradients outside the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Saved:
    """What a node saved that the gradients of some of its edges need.

    Attributes:
        tensors: By torch's name.
        settings: Values that are not tensors, by torch's name.
        shapes: Edge -> shape of the gradient that belongs there, for the rule's shaped edges.
        flipped: Edges whose operand is a turned matrix: its gradient is best computed the other
            way round, as torch does.
    """

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    shapes: Mapping[int, torch.Size]
    flipped: Sequence[int]


@dataclass(slots=True)
class Product:
    """A gradient that is ``scale * left @ right``."""

    left: Tensor
    right: Tensor
    scale: Any

    def turned(self) -> Product:
        """The product whose value is the transposed one."""
        return Product(self.right.mT, self.left.mT, self.scale)

    def value(self) -> Tensor:
        """The product itself, a new tensor."""
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
