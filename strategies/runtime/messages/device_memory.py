"""Tensors between ranks that use one GPU: in device memory that both have mapped.

NCCL refuses two ranks on one GPU, and a way through host memory makes the device wait for the host
twice. Here the sender copies a tensor into a block that the receiver has mapped as well (CUDA IPC);
the receiver copies it out. No host waits for the device, and no kernel waits for another rank: two
events per block order the copies of both processes.

    sender                                    receiver
    current stream waits for ``emptied``
    copy into the block
    record ``filled``
    announce the block by the socket    ->    current stream waits for ``filled``
                                              copy out of the block
                                              record ``emptied``
    block is free                       <-    set the block's byte

A wait binds to the latest record at the time when it is given, and an event that has never been
recorded counts as passed. So each end records first and tells the other then, by socket or byte.
Until its byte is set no block is written to, hence neither event is recorded again too early.

The receiver copies, although it could use the block where it lies: what a stage keeps for its
backward would hold the sender's blocks, where the receiver's allocator does not see them, and
nothing tells when the device has done with a tensor that Python has let go of. A copy inside the
device takes 2 bytes of its bandwidth per byte, far less than the kernels that use it.

The driver allocates blocks, not torch: a handle is of a whole allocation, so one inside torch's
segments would show the other process its neighbours, and expandable segments have none. Blocks are
no part of what torch counts.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from strategies.errors import RunError
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.shared_memory import Channel

# Of an announcement: number of the block, bytes in it and its size; of a new block the handles of
# its memory and of both events follow.
_PACKET = struct.Struct("<qqq")
_HANDLE = 64
_GRAIN = 2**21  # What is smaller, or no multiple, shares an allocation with others in the driver.
_TRIAL_TAG = -1
_TRIAL_S = 20.0
_LAST_WAIT_S = 5.0
_LOOK_S = 1e-4


@dataclass(frozen=True, slots=True)
class Block:
    """Device memory of the sender, and the events that order who uses it."""

    number: int
    pointer: int
    data: Tensor
    filled: Any
    emptied: Any


class DeviceChannel:
    """Tensors of a device to and from another rank that uses it; one thread at each end."""

    def __init__(self, words: Channel, device: torch.device) -> None:
        """``words`` brings announcements, and tensors in host memory as they are."""
        self._words = words
        self._device = device
        self._own: list[Block] = []
        self._theirs: dict[int, Block] = {}
        # At the end of the process the driver takes everything back by itself.
        ending = weakref.finalize(self, _give_back, words, self._own, self._theirs, os.getpid())
        ending.atexit = False

    def send(self, tensor: Tensor, tag: int) -> None:
        """Enqueues a copy on the current stream and announces it.

        The tensor, contiguous, may be changed or freed by whatever comes later on that stream.
        """
        if tensor.device.type == "cpu":
            self._words.send(tensor, tag)
            return
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        size = flat.numel()
        block, handles = self._free_block(size)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(block.emptied)
        block.data[:size].copy_(flat)
        block.filled.record(stream)
        room = block.data.numel()
        self._words.write(_PACKET.pack(block.number, size, room) + handles, tag)

    def take(
        self, tag: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The oldest message of that tag; waits for its announcement, not for its contents.

        ``device`` is where the sender had it, this device or the host.

        Raises:
            RuntimeError: The other end has gone, or has said nothing for the time-out.
        """
        if device.type == "cpu":
            return self._words.take(tag, shape, dtype)
        target = torch.empty(shape, dtype=dtype, device=device)
        self.take_into(target, tag)
        return target

    def take_into(self, target: Tensor, tag: int) -> None:
        """``take``, into a contiguous tensor."""
        if target.device.type == "cpu":
            target.copy_(self._words.take(tag, target.shape, target.dtype))
            return
        packet = self._words.read(tag)
        number, size, room = _PACKET.unpack_from(packet)
        if size != target.nbytes:
            raise RunError(
                f"a message of {size} bytes came where one of {target.nbytes} was expected: the "
                "ranks do not run the same program."
            )
        if number not in self._theirs:
            handles = packet[_PACKET.size :]
            self._theirs[number] = _opened(number, room, handles, self._device)
        block = self._theirs[number]
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(block.filled)
        target.view(-1).view(torch.uint8).copy_(block.data[:size])
        block.emptied.record(stream)
        self._words.set_state(number, _FREE)

    def has(self, tag: int) -> bool:
        """Whether a message of that tag has been announced."""
        return self._words.has(tag)

    def drain(self) -> None:
        """Returns when the device has copied out all that was sent, either way; both ends call it.

        A process that ends earlier takes its blocks with it.

        Raises:
            RuntimeError: The other end has not taken what it was sent within the time-out.
        """
        for block in self._theirs.values():
            block.emptied.synchronize()
        for block in self._own:
            if not self._words.until(partial(self._is_idle, block)):
                raise self._words.timed_out("send")

    def _is_idle(self, block: Block) -> bool:
        return self._words.state(block.number) != _LENT and bool(block.emptied.query())

    def unmap(self) -> None:
        """Lets go of the other end's blocks; behind ``drain``."""
        for block in self._theirs.values():
            _unmap(self._words, block)
        self._theirs.clear()

    def free(self) -> None:
        """Frees own blocks that the other end has let go of; others stay until the process ends."""
        if self._words.until(self._are_unmapped, at_most_s=_LAST_WAIT_S):
            for block in self._own:
                free(block.pointer)
        self._own.clear()

    def _are_unmapped(self) -> bool:
        return all(self._words.state(block.number) == _UNMAPPED for block in self._own)

    def _free_block(self, size: int) -> tuple[Block, bytes]:
        """One that nothing reads, and its handles if the other end does not have them."""
        for block in self._own:
            room = block.data.numel()
            # A large one for a small message would be missing for the next large one.
            if size <= room <= max(2 * size, _GRAIN) and self._words.state(block.number) == _FREE:
                self._words.lend(block.number)
                return block, b""
        number = self._words.new_number()
        room = max(1, -(-size // _GRAIN)) * _GRAIN
        # Before the memory: a thread's first event makes the device's context the driver's, too.
        filled, emptied = (torch.cuda.Event(interprocess=True) for _ in range(2))  # type: ignore[no-untyped-call]
        events: bytes = filled.ipc_handle() + emptied.ipc_handle()  # type: ignore[no-untyped-call]
        pointer, memory = allocate(room)
        block = Block(number, pointer, _data(pointer, room, self._device), filled, emptied)
        self._own.append(block)
        self._words.lend(number)
        return block, memory + events


_FREE, _LENT, _UNMAPPED = range(3)  # a block's byte


def _opened(number: int, room: int, handles: bytes, device: torch.device) -> Block:
    memory, *both = (handles[start : start + _HANDLE] for start in range(0, 3 * _HANDLE, _HANDLE))
    filled, emptied = (torch.cuda.Event.from_ipc_handle(device, each) for each in both)  # type: ignore[no-untyped-call]
    pointer = open_handle(memory)
    return Block(number, pointer, _data(pointer, room, device), filled, emptied)


def _data(pointer: int, room: int, device: torch.device) -> Tensor:
    # One that an evaluation makes in its inference mode could not be written to in training.
    with torch.inference_mode(False):
        return mapped(pointer, room, device)


def _give_back(words: Channel, own: list[Block], theirs: dict[int, Block], pid: int) -> None:
    """What can be given back without waiting; the rest stays until the process ends.

    Not in a child that was forked, a loader's process: it has no device.
    """
    if os.getpid() != pid:
        return
    with suppress(RuntimeError):  # of a device that has failed
        for block in theirs.values():
            if block.emptied.query():
                _unmap(words, block)
        for block in own:
            if words.state(block.number) == _UNMAPPED:
                free(block.pointer)


def _unmap(words: Channel, block: Block) -> None:
    close_handle(block.pointer)
    words.set_state(block.number, _UNMAPPED)


# -------------------------------------------------------------------------------------- agreement


def share_device(
    exchange: Exchange, channels: dict[int, Channel], device: torch.device
) -> tuple[dict[int, DeviceChannel], str | None]:
    """Channels to the members with which this rank can share device memory; collective.

    Two ranks can if both see the same GPU, and each has read from the other's memory what the
    other had written, twice, so that a block has been used again. Both ends agree.

    Returns:
        The channels, by rank, and why some ranks of one machine have none; None if all do.
    """
    own = str(torch.cuda.get_device_properties(device).uuid)
    gpus = exchange.everyone(own)
    found = {other: DeviceChannel(each, device) for other, each in channels.items()}
    wrong = {other: "they use different GPUs" for other in channels if gpus[other] != own}
    # Should an event never pass, it is not the rank's own stream that waits for it.
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        for turn in range(2):
            for other, channel in found.items():
                _note(wrong, other, partial(_send, channel, _trial(exchange.rank, turn, device)))
            told = exchange.everyone(wrong)
            for other, channel in found.items():
                if exchange.rank in told[other]:
                    wrong.setdefault(other, told[other][exchange.rank])
                _note(wrong, other, partial(_compare, channel, _trial(other, turn, device)))
            told = exchange.everyone(wrong)
            for other in found:
                if exchange.rank in told[other]:
                    wrong.setdefault(other, told[other][exchange.rank])
    reasons = sorted({why for each in told for why in each.values()})
    return {o: c for o, c in found.items() if o not in wrong}, "; ".join(reasons) or None


def _note(wrong: dict[int, str], other: int, call: Callable[[], None]) -> None:
    if other in wrong:
        return
    try:
        call()
    except Exception as error:  # whatever it is, the other way is open
        wrong[other] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _trial(rank: int, turn: int, device: torch.device) -> Tensor:
    return torch.arange(2**16, device=device) * (2 * rank + turn + 1)


def _send(channel: DeviceChannel, tensor: Tensor) -> None:
    channel.send(tensor, _TRIAL_TAG)


def _compare(channel: DeviceChannel, expected: Tensor) -> None:
    found = channel.take(_TRIAL_TAG, expected.shape, expected.dtype, expected.device)
    passed = torch.cuda.current_stream(expected.device).record_event()
    until = time.monotonic() + _TRIAL_S
    while not passed.query():
        if time.monotonic() > until:
            raise RunError(f"an event of the other process has not passed in {_TRIAL_S:g} s")
        time.sleep(_LOOK_S)
    if not torch.equal(found, expected):
        raise RunError("what came is not what was sent")


# ----------------------------------------------------------------------------------------- driver


class _MemoryHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE),)


@cache
def _driver() -> ctypes.CDLL:
    """The driver's library: torch has loaded it, and its name does not depend on torch's build."""
    found = ctypes.CDLL("libcuda.so.1")
    address, size = ctypes.c_uint64, ctypes.c_size_t
    found.cuMemAlloc_v2.argtypes = (ctypes.POINTER(address), size)
    found.cuMemFree_v2.argtypes = (address,)
    found.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_MemoryHandle), address)
    found.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(address), _MemoryHandle, ctypes.c_uint)
    found.cuIpcCloseMemHandle.argtypes = (address,)
    found.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    return found


_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        said = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(said))
        raise RuntimeError(f"{name}: {(said.value or b'error').decode()} ({code})")


def allocate(size: int) -> tuple[int, bytes]:
    """Device memory of the current context: its address, and its handle for other processes.

    Raises:
        torch.OutOfMemoryError: The device has no room, even without what torch keeps for later.
    """
    pointer = ctypes.c_uint64()
    code = _driver().cuMemAlloc_v2(ctypes.byref(pointer), size)
    if code == _OUT_OF_MEMORY:
        torch.cuda.empty_cache()
        code = _driver().cuMemAlloc_v2(ctypes.byref(pointer), size)
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB for messages between "
            "ranks that share the GPU."
        )
    if code:
        raise RuntimeError(f"cuMemAlloc failed ({code})")
    handle = _MemoryHandle()
    try:
        _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
    except RuntimeError:
        free(pointer.value)
        raise
    return pointer.value, bytes(handle)


def free(pointer: int) -> None:
    _call("cuMemFree_v2", pointer)


def open_handle(handle: bytes) -> int:
    """Maps another process's memory; returns its address here."""
    pointer = ctypes.c_uint64()
    taken = _MemoryHandle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), taken, _LAZY_PEER_ACCESS)
    return pointer.value


def close_handle(pointer: int) -> None:
    _call("cuIpcCloseMemHandle", pointer)


def mapped(pointer: int, size: int, device: torch.device) -> Tensor:
    """The bytes there, as a tensor that does not own them."""
    return torch.as_tensor(_Memory(pointer, size), device=device)


class _Memory:
    """What ``torch.as_tensor`` takes for an array on a device."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }
