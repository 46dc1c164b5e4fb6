"""Boundary tensors between tensor-parallel ranks: each sends its slice, arrivals are gathered.

Every rank of the sending group holds the whole tensor. So each sends one slice to its counterpart,
and the receiving ranks complete it over their own, faster links.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strategies.errors import ModelError
from strategies.runtime.tensor_parallel.ranks import TensorRanks
from strategies.runtime.transport import Handle, Transport

_ROUNDING = 1e-2


class SlicedTransport(Transport):
    """Another transport's messages, a slice of the flattened tensor each.

    Args:
        inner: What carries the slices.
        ranks: Who has the others.
    """

    def __init__(self, inner: Transport, ranks: TensorRanks) -> None:
        self._inner = inner
        self._ranks = ranks
        self.ordered = inner.ordered
        self.slices = ranks.size

    def send(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        """Sends this rank's slice."""
        width = self._width(tensor)
        start = min(self._ranks.rank * width, tensor.numel())
        own = tensor.view(-1)[start : start + width]
        if own.numel() < width:
            # All slices have one size, so that they can be gathered.
            padded = own.new_zeros(width)
            padded[: own.numel()] = own
            own = padded
        return _Sent(self._inner.send(own, rank, tag), own)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        """Receives a slice; the gathering waits for ``wait``, which all ranks call in one order."""
        own = tensor.new_empty(self._width(tensor))
        return _Gathering(self._inner.receive(own, rank, tag), own, tensor, self._ranks)

    def check_whole(self, stage: int, tensors: Sequence[Tensor]) -> None:
        """Compares tensors between ranks: slices of different tensors make no whole.

        Raises:
            ModelError: They differ by more than rounding.
        """
        for tensor in tensors:
            copies = self._ranks.gather(tensor.detach()).double()
            spread = copies.amax(0) - copies.amin(0)
            if spread.numel() and spread.max() > _ROUNDING * copies.abs().max():
                raise ModelError(
                    f"tp={self._ranks.size}: stage {stage} hands on a tensor of "
                    f"{tuple(tensor.shape)} that differs between tensor-parallel ranks, as the "
                    "output of a 'colwise' layer does. Let a unit end with a 'rowwise' layer, or "
                    "cut elsewhere with schedule.layers_per_stage."
                )

    def _width(self, tensor: Tensor) -> int:
        return -(-tensor.numel() // self._ranks.size)


class _Sent:
    def __init__(self, handle: Handle, slice_: Tensor) -> None:
        self._handle = handle
        self._slice = slice_

    def wait(self) -> None:
        self._handle.wait()


class _Gathering:
    def __init__(self, handle: Handle, slice_: Tensor, target: Tensor, ranks: TensorRanks) -> None:
        self._handle = handle
        self._slice = slice_
        self._target = target
        self._ranks = ranks

    def wait(self) -> None:
        self._handle.wait()
        whole = self._target.view(-1)
        if whole.numel() == self._slice.numel() * self._ranks.size:
            self._ranks.gather_into(whole, self._slice)
        else:
            gathered = self._slice.new_empty(self._slice.numel() * self._ranks.size)
            self._ranks.gather_into(gathered, self._slice)
            whole.copy_(gathered[: whole.numel()])
