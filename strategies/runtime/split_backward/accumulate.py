"""Adds gradients to ``.grad`` as torch's accumulation does: in place where there is one."""

from __future__ import annotations

import torch
from torch import Tensor

from strategies.runtime.split_backward.rule import Product


def add_gradient(leaf: Tensor, gradient: Tensor) -> None:
    """Adds a gradient of the leaf's shape that nobody else refers to."""
    present = leaf.grad
    if present is None:
        leaf.grad = _as_torch_lays_it_out(leaf, gradient)
    elif present.layout is torch.strided:
        present.add_(gradient)
    else:
        leaf.grad = gradient + present


def add_product(leaf: Tensor, product: Product, *, exact: bool) -> None:
    """Adds a product, in one call where torch can and ``exact`` does not forbid it."""
    present = leaf.grad
    if (
        exact
        or present is None
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
