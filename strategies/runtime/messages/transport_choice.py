"""Which transport a pipeline's messages take; between tensor-parallel ranks, in slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.errors import ModelError
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks
from strategies.runtime.messages.device_transport import (
    DeviceTransport,
    NcclTransport,
    StagedTransport,
)
from strategies.runtime.messages.mesh import Communicators, Coordinates
from strategies.runtime.messages.transport import (
    GlooTransport,
    Handle,
    SharedTransport,
    StrictTransport,
    Transport,
)


def chosen_transport(
    backend: str,
    communicators: Communicators,
    where: Coordinates,
    device: torch.device,
    tensor_ranks: TensorRanks | None,
    *,
    timeout_s: float,
) -> Transport | None:
    """The transport of a backend; None for a pipeline of one rank. Collective over the pipeline.

    Tensor-parallel ranks send a slice each, unless their stream is cut along the sequence anyway.
    """
    transport = _whole(backend, communicators, where, device, timeout_s)
    if transport is None or tensor_ranks is None or tensor_ranks.sequence:
        return transport
    return SlicedTransport(transport, tensor_ranks)


def _whole(
    backend: str,
    communicators: Communicators,
    where: Coordinates,
    device: torch.device,
    timeout_s: float,
) -> Transport | None:
    pipeline = where.pipeline(where.dp_rank)
    group = communicators.get("messages", pipeline)
    if group is None:
        return None
    if backend == "nccl":

        def pair(source: int, target: int) -> dist.ProcessGroup:
            found = communicators.get("messages", (pipeline[source], pipeline[target]))
            assert found is not None
            return found

        return NcclTransport(pair, where.pp_rank, device)
    if backend == "strict":
        return StrictTransport(group)
    if backend == "shared":
        if device.type == "cuda":
            return DeviceTransport(group, device, timeout_s=timeout_s)
        return SharedTransport(group, timeout_s=timeout_s)
    # Gloo sends host memory only.
    if backend == "staged" or device.type == "cuda":
        return StagedTransport(group, device)
    return GlooTransport(group)


_ROUNDING = 1e-2


class SlicedTransport(Transport):
    """Another transport's messages, a slice of the flattened tensor each.

    Every rank of the sending group holds the whole tensor. So each sends one slice to its
    counterpart, and the receiving ranks complete it over their own, faster links.
    """

    def __init__(self, inner: Transport, ranks: TensorRanks) -> None:
        self._inner = inner
        self._ranks = ranks
        self.ordered = inner.ordered
        self.slices = ranks.size

    def send(self, tensor: Tensor, rank: int, tag: int) -> Handle:
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
        """Compares tensors between ranks: slices of different tensors make no whole."""
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

    def drain(self) -> None:
        self._inner.drain()

    def close(self) -> None:
        self._inner.close()

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
