"""How tensors get from rank to rank: the interface, and the backends of ranks on CPU.

Those of ranks on GPUs are in ``device_transport``. ``ordered`` backends match messages by their
order alone, as NCCL does: the executor then issues every message exactly where the program has it.
The others match by tag, so receives may be posted ahead of their place.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.shared_memory import Channel, connect

_WORTH_A_THREAD = 2**16  # bytes, which are copied in 10 microseconds or so


class Handle(Protocol):
    """Something that ends later."""

    def wait(self) -> object:
        """Returns when it has ended; called once."""
        ...


class Arrival(Protocol):
    """A tensor that comes later."""

    def wait(self) -> Tensor:
        """Returns it when it is here; called once."""
        ...

    def is_here(self) -> bool:
        """Whether it is known to be; asked before ``wait``."""
        ...


class Transport(ABC):
    """Point-to-point messages inside one pipeline."""

    ordered: bool  # whether messages are matched by their order alone
    slices: int = 1  # in how many ranks' messages a tensor travels
    copies: bool = False  # whether the rank itself copies in ``send``

    @abstractmethod
    def send(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        """Starts sending to a pipeline rank; the tensor must stay unchanged until it has ended."""

    def send_meanwhile(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        """As ``send``, for a rank that has something else to do now."""
        return self.send(tensor, rank, tag)

    @abstractmethod
    def receive(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        """Starts receiving into ``tensor``."""

    def expect(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int, tag: int
    ) -> Arrival:
        """Starts receiving a tensor, wherever it will lie."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return _Received(self.receive(tensor, rank, tag), tensor)

    def check_whole(self, stage: int, tensors: Sequence[Tensor]) -> None:  # noqa: B027
        """Called once for every new shape; refuses what cannot travel in slices."""

    def drain(self) -> None:  # noqa: B027
        """Returns when this process may end: nobody needs memory of it any more; all call it."""

    def close(self) -> None:  # noqa: B027
        """Gives back what other ranks have mapped; drained, and all call it."""


class GlooTransport(Transport):
    """Tagged messages on CPU; sends end when the peer has posted its receive.

    If the peer has posted it already, gloo's isend writes to the socket before it returns: 0.3 ms
    per MB in which the rank would not compute. So all calls are made by a thread of their own, and
    to the group itself: ``dist.isend`` takes a third more, with the rank waiting for Python's lock.
    """

    ordered = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        """``device``: whose pinned memory is sent, if any."""
        self._group = group
        self._calls = serving_thread("messages", self, device)

    def send(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        return self._later(partial(self._group.send, [_as_real(tensor)], rank, tag))

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        return self._later(partial(self._group.recv, [_as_real(tensor)], rank, tag))

    def _later(self, call: Callable[[], dist.Work | None]) -> Handle:
        later = Later(call)
        self._calls.put(later)
        return later


def _as_real(tensor: Tensor) -> Tensor:
    """The same memory, as gloo takes it."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class SharedTransport(Transport):
    """Shared memory between ranks of one machine, gloo to all others.

    A rank that goes on computing lets a thread copy what it sends, if there is a core for that.
    Where it is about to wait it copies by itself: a thread would begin later.
    """

    ordered = False

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        """Collective over the group."""
        exchange = Exchange(group)
        self._near = connect(exchange, timeout_s=timeout_s)
        alone = len(self._near) == exchange.size - 1
        self._gloo = None if alone else GlooTransport(group)
        self._copies: SimpleQueue[Later | None] | None = None
        self.copies = bool(self._near) and len(os.sched_getaffinity(0)) > 1

    def send(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        channel = self._near.get(rank)
        if channel is None:
            assert self._gloo is not None
            return self._gloo.send(tensor, rank, tag)
        channel.send(tensor, tag)
        return ENDED

    def send_meanwhile(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        channel = self._near.get(rank)
        if channel is None or tensor.nbytes < _WORTH_A_THREAD:
            return self.send(tensor, rank, tag)
        if self._copies is None:
            self._copies = serving_thread("copies", self)
        later = Later(partial(_ended, channel.send_later(tensor, tag)))
        self._copies.put(later)
        return later

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        channel = self._near.get(rank)
        if channel is None:
            assert self._gloo is not None
            return self._gloo.receive(tensor, rank, tag)
        return _Copied(_Near(channel, tensor.shape, tensor.dtype, tag), tensor)

    def expect(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int, tag: int
    ) -> Arrival:
        channel = self._near.get(rank)
        if channel is None:
            return super().expect(shape, dtype, device, rank, tag)
        return _Near(channel, shape, dtype, tag)


def _ended(copy: Callable[[], None]) -> Handle:
    copy()
    return ENDED


class _Near:
    """A tensor from a rank of this machine; nothing has to be done before it is waited for."""

    __slots__ = ("_channel", "_dtype", "_shape", "_tag")

    def __init__(
        self, channel: Channel, shape: Sequence[int], dtype: torch.dtype, tag: int
    ) -> None:
        self._channel = channel
        self._shape = shape
        self._dtype = dtype
        self._tag = tag

    def wait(self) -> Tensor:
        return self._channel.take(self._tag, self._shape, self._dtype)

    def is_here(self) -> bool:
        return self._channel.has(self._tag)


class _Copied:
    def __init__(self, arrival: Arrival, target: Tensor) -> None:
        self._arrival = arrival
        self._target = target

    def wait(self) -> None:
        self._target.copy_(self._arrival.wait())


class _Received:
    def __init__(self, handle: Handle, tensor: Tensor) -> None:
        self._handle = handle
        self._tensor = tensor

    def wait(self) -> Tensor:
        self._handle.wait()
        return self._tensor

    def is_here(self) -> bool:
        return False  # Nobody looks.


class StrictTransport(Transport):
    """What the least friendly backend may do: no tags, in order, a send waits for its receive.

    For tests: a program that passes here depends on nothing that gloo grants beyond NCCL.
    """

    ordered = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        own_work(dist.isend(tensor, group=self._group, group_dst=rank, tag=0)).wait()
        return ENDED

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Handle:
        own_work(dist.irecv(tensor, group=self._group, group_src=rank, tag=0)).wait()
        return ENDED


class Later:
    """A message that another thread starts."""

    __slots__ = ("_call", "_error", "_started", "_work")

    def __init__(self, call: Callable[[], Handle | None]) -> None:
        self._call: Callable[[], Handle | None] | None = call
        self._work: Handle | None = None
        self._error: Exception | None = None
        # Held until the call has been made. Lighter than an Event, and there are many messages.
        self._started = threading.Lock()
        self._started.acquire()

    def start(self) -> None:
        assert self._call is not None
        try:
            self._work = self._call()
        except Exception as error:  # raised again where the message is waited for
            self._error = error
        self._call = None
        self._started.release()

    def wait(self) -> None:
        """Raises what starting the message raised."""
        self._started.acquire()
        if self._error is not None:
            raise self._error
        assert self._work is not None, "this process is not in the message's group"
        self._work.wait()


def serving_thread(
    name: str, owner: object, device: torch.device | None = None
) -> SimpleQueue[Later | None]:
    """The queue of a thread that starts what is put there, and ends with its owner."""
    calls: SimpleQueue[Later | None] = SimpleQueue()
    threading.Thread(target=_serve, args=(calls, device), name=name, daemon=True).start()
    # The thread does not keep the owner alive.
    weakref.finalize(owner, calls.put, None)
    return calls


def _serve(calls: SimpleQueue[Later | None], device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        # Each thread has a current device, GPU 0 at first: a wait for an event there would make
        # every rank of the machine a context on it.
        torch.cuda.set_device(device)
    while True:
        later = calls.get()
        if later is None:
            return
        later.start()
        # The next one may take long to come: its tensor must not stay until then.
        del later


class _Ended:
    def wait(self) -> None:
        """Nothing left to wait for."""


ENDED = _Ended()


def own_work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the message's group"
    return work
