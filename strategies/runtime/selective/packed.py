"""What stands in the autograd graph for a tensor that a selectively recomputed layer has saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from strategies.errors import ModelError

if TYPE_CHECKING:
    from strategies.runtime.selective.region import Region


class Kept:
    """A tensor that is there: an input, a weight, or what a kept operation gave."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # With its history it would hold the node that holds it.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: It was changed in place since.
        """
        _check(self._tensor, self._version)
        return self._tensor

    def held_tensors(self) -> Iterable[Tensor]:
        """What this keeps in memory."""
        return (self._tensor,)


class Computed:
    """A tensor that its layer computes again when the first of its kind is asked for.

    It may be asked for more than once: a split backward does, for the operands of products whose
    weight gradients wait.
    """

    __slots__ = ("__weakref__", "_kind", "_region", "_tensor", "_version")

    def __init__(self, region: Region, tensor: Tensor) -> None:
        self._region: Region | None = region
        self._kind = (tensor.shape, tensor.dtype)
        self._tensor: Tensor | None = None
        self._version = 0

    def fill(self, tensor: Tensor) -> None:
        """Takes what the layer's second run has made.

        Raises:
            ModelError: It is another tensor than the first time.
        """
        if (tensor.shape, tensor.dtype) != self._kind:
            raise ModelError(
                "a layer that is recomputed did something else the second time: it saved a tensor "
                f"of {list(tensor.shape)} and {tensor.dtype} instead of {list(self._kind[0])} and "
                f"{self._kind[1]}. Its forward must depend on its inputs only; if it cannot, use "
                "recompute=none."
            )
        self._tensor, self._version = tensor.detach(), tensor._version
        self._region = None

    def unpack(self) -> Tensor:
        """The tensor, after the layer's second run."""
        if self._region is not None:
            self._region.run_again()
        if self._tensor is None:
            raise ModelError(
                "a layer that is recomputed saved less the second time. Its forward must depend "
                "on its inputs only; if it cannot, use recompute=none."
            )
        _check(self._tensor, self._version)
        return self._tensor

    def held_tensors(self) -> Iterable[Tensor]:
        """What this keeps in memory, all that the second run needs included."""
        if self._tensor is not None:
            return (self._tensor,)
        return () if self._region is None else self._region.held_tensors()


def unpack(packed: Kept | Computed) -> Tensor:
    """What autograd asks for."""
    return packed.unpack()


def _check(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of {list(tensor.shape)} is at version {tensor._version}; "
            f"expected version {version} instead."
        )
