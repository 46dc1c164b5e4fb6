"""How tensors get from GPU to GPU: by NCCL, in memory of a shared GPU, or through the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.models.state import Fetch
from strategies.runtime.messages.device_memory import DeviceChannel, share_device
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.shared_memory import connect
from strategies.runtime.messages.transport import (
    ENDED,
    Arrival,
    GlooTransport,
    Handle,
    Later,
    Transport,
    own_work,
    serving_thread,
)

_log = logging.getLogger(__name__)


class NcclTransport(Transport):
    """One communicator per ordered pair of ranks, so that one direction never blocks the other.

    Untested with more than one GPU until somebody has run it.
    """

    ordered = True

    def __init__(
        self, pair: Callable[[int, int], dist.ProcessGroup], rank: int, device: torch.device
    ) -> None:
        self._pair = pair
        self._rank = rank
        self._device = device

    def send(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        """Enqueued on the pair's stream; ``wait`` orders the current stream behind it."""
        group = self._pair(self._rank, rank)
        data = _as_bytes(tensor.to(self._device))
        work = own_work(dist.isend(data, group=group, group_dst=int(self._rank < rank)))
        return _Kept(work, data)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        group = self._pair(rank, self._rank)
        data = _as_bytes(tensor)
        return own_work(dist.irecv(data, group=group, group_src=int(self._rank < rank)))

    def expect(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int, tag: int
    ) -> Arrival:
        arrival = super().expect(shape, dtype, self._device, rank, tag)
        return _ToHost(arrival) if device.type == "cpu" else arrival


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory: NCCL has no short or unsigned integers, nor complex numbers."""
    return tensor.view(-1).view(torch.uint8)


class _Kept:
    """A send whose data may be a copy, which is kept until it has ended."""

    def __init__(self, work: Handle, data: Tensor) -> None:
        self._work = work
        self._data: Tensor | None = data

    def wait(self) -> None:
        self._work.wait()
        self._data = None


class _ToHost:
    """A tensor of the host that travels through the device."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival

    def wait(self) -> Tensor:
        return self._arrival.wait().cpu()

    def is_here(self) -> bool:
        return self._arrival.is_here()


class DeviceTransport(Transport):
    """In device memory between ranks that share a GPU; through host memory to all others.

    ``Transport.drain`` matters here: a process that ends takes the memory with it in which its
    last messages are.
    """

    ordered = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout_s: float) -> None:
        """Collective over the group."""
        exchange = Exchange(group)
        words = connect(exchange, timeout_s=timeout_s)
        self._near, why = share_device(exchange, words, device)
        alone = len(self._near) == exchange.size - 1
        self._staged = None if alone else StagedTransport(group, device)
        if why is not None and dist.get_rank() == 0:
            _log.warning(
                "cluster.backend=shared: some ranks of one machine exchange tensors through host "
                "memory (%s). Use cluster.backend=nccl where each rank has a GPU of its own.",
                why,
            )

    def send(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        channel = self._near.get(rank)
        if channel is None:
            assert self._staged is not None
            return self._staged.send(tensor, rank, tag)
        channel.send(tensor, tag)
        return ENDED

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        channel = self._near.get(rank)
        if channel is None:
            assert self._staged is not None
            return self._staged.receive(tensor, rank, tag)
        return _CopiedOut(channel, tensor, tag)

    def expect(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int, tag: int
    ) -> Arrival:
        channel = self._near.get(rank)
        if channel is None:
            return super().expect(shape, dtype, device, rank, tag)
        return _Announced(channel, shape, dtype, device, tag)

    def drain(self) -> None:
        for channel in self._near.values():
            channel.drain()

    def close(self) -> None:
        for channel in self._near.values():
            channel.unmap()
        for channel in self._near.values():
            channel.free()


class _Announced:
    """A tensor in a block; its own memory is taken when it is waited for."""

    __slots__ = ("_channel", "_device", "_dtype", "_shape", "_tag")

    def __init__(
        self,
        channel: DeviceChannel,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        tag: int,
    ) -> None:
        self._channel = channel
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._tag = tag

    def wait(self) -> Tensor:
        return self._channel.take(self._tag, self._shape, self._dtype, self._device)

    def is_here(self) -> bool:
        return self._channel.has(self._tag)


class _CopiedOut:
    def __init__(self, channel: DeviceChannel, target: Tensor, tag: int) -> None:
        self._channel = channel
        self._target = target
        self._tag = tag

    def wait(self) -> None:
        self._channel.take_into(self._target, self._tag)


class StagedTransport(Transport):
    """Gloo through pinned memory, for ranks that share a GPU (NCCL refuses that).

    A thread waits for the copies to the host, so that the rank can give the device its next work.
    It is not the thread that posts receives: those must not wait for what the device still does.
    Copies have a stream for each direction, and kernels that need none of them run meanwhile.
    """

    ordered = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._gloo = GlooTransport(group, device)
        self._copies = serving_thread("copies", self, device)
        self._device = device
        self._to_host, self._from_host = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def send(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        """Starts a copy to the host; the message leaves when it is there. Never waits."""
        fetch = Fetch(tensor, stream=self._to_host)
        later = Later(lambda: self._gloo.send(fetch.tensor(), rank, tag))
        self._copies.put(later)
        return later

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        if tensor.device.type == "cpu":
            return self._gloo.receive(tensor, rank, tag)
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return _Landing(self._gloo.receive(staged, rank, tag), staged, tensor, self._from_host)


class _Landing:
    def __init__(
        self, handle: Handle, staged: Tensor, target: Tensor, stream: torch.cuda.Stream
    ) -> None:
        self._handle = handle
        self._staged = staged
        self._target = target
        self._stream = stream
        # Its memory may have been another tensor's, for which the current stream is still needed.
        self._free = torch.cuda.current_stream(target.device).record_event()

    def wait(self) -> None:
        self._handle.wait()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free)
            self._target.copy_(self._staged, non_blocking=True)
            landed = self._stream.record_event()
        torch.cuda.current_stream(self._target.device).wait_event(landed)
