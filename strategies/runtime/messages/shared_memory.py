"""Tensors between ranks of one machine: in memory that both have mapped, announced by a word.

Gloo brings a tensor through the kernel's TCP, with threads of its own on both sides. Here the
sender copies it into a block of memory that the receiver has mapped as well, and announces it by a
packet of a Unix socket; the receiver uses it where it lies. What is left of a message is one copy
and one wake-up, and nothing has to be posted ahead.

A block belongs to its sender. The receiver has it from the announcement until the last tensor that
lies in it is gone, and the sender, who finds no free one, makes another. Blocks have no name that
could outlive both processes, and are not limited by the size of /dev/shm.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from strategies.errors import RunError
from strategies.runtime.messages.exchange import Exchange

# Of an announcement: tag, number of the block (none: the bytes follow) and their count.
_PACKET = struct.Struct("<qiq")
_NO_BLOCK = -1
_SMALL = 1024  # bytes that travel in the announcement itself
_PAGE = 4096
_LOOK_S = 1e-4
_BLOCKS = 2**20  # per direction; a byte of each says whether the receiver has it
_FD = struct.Struct("@i")

_log = logging.getLogger(__name__)

Place = list[str | int]
_Packet = bytes | tuple[int, int]  # an arrived message: its bytes, or its block and their count
# Of the sender: number, bytes, and handle if the other end does not have it yet.
_Block = tuple[int, Tensor, int | None]


def connect(
    exchange: Exchange, *, timeout_s: float, place: Place | None = None
) -> dict[int, Channel]:
    """Channels to all members of the group on this machine, by their rank in it; collective.

    Two ranks are on one machine if they see the same kernel and network, as the same user. Ranks
    that emulate hosts by network namespaces are not: their messages take the links between these.
    ``place`` is what is compared; found out if left out. Two ranks of one machine that cannot
    connect have no channel either; the first rank says which, and why.
    """
    rank, own = exchange.rank, secrets.token_hex(16)
    place = place or _place()
    places = exchange.everyone(place)
    near = [r for r, said in enumerate(places) if place is not None and said == place and r != rank]
    found: dict[int, Channel] = {}
    failed: dict[int, str] = {}
    # All ranks are here: what a killed one would leave, the folder, exists for a moment.
    with _listening() if near else nullcontext((None, "")) as (listener, folder):
        told = exchange.everyone([own, listener is not None, folder])
        for other in (r for r in near if r > rank):
            _, listens, there = told[other]
            try:
                if not listens:
                    raise OSError(there)
                found[other] = _called(there, own, timeout_s)
            except OSError as error:
                failed[other] = str(error)
        called = exchange.everyone([sorted(found), failed])
        if listener is not None:
            awaited = {told[r][0]: r for r in near if r < rank and rank in called[r][0]}
            found |= _answered(listener, awaited, timeout_s)
    for other in sorted(found):
        if other > rank:
            found[other].hear()
    if rank == 0:
        _tell_failed([wrong for _, wrong in called])
    return found


def _tell_failed(failed: Sequence[dict[int, str]]) -> None:
    pairs = [f"{rank} and {other}" for rank, wrong in enumerate(failed) for other in wrong]
    if pairs:
        _log.warning(
            "pipeline ranks %s are on one machine, but exchange tensors by gloo and not in shared "
            "memory: %s. This is slower. Try another folder as TMPDIR.",
            ", ".join(pairs),
            next(reason for wrong in failed for reason in wrong.values()),
        )


def _place() -> Place | None:
    """What is equal on two processes that can share memory; None where none can be shared."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    try:
        os.close(os.memfd_create("foldpipe"))  # Some sandboxes have none.
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return None
    return [boot, network.st_dev, network.st_ino, os.getuid()]


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def _listening() -> Iterator[tuple[socket.socket | None, str]]:
    """A socket in a folder that only this user can enter, and the folder; or None, and why."""
    try:
        folder = tempfile.mkdtemp(prefix="foldpipe-")
    except OSError as error:
        yield None, str(error)
        return
    try:
        with _socket() as listener:
            try:
                _at(folder, listener.bind)
                listener.listen()
            except OSError as error:
                yield None, str(error)
            else:
                yield listener, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _at(folder: str, call: Callable[[str], object]) -> None:
    """Binds or connects a socket there: an address has 108 bytes, and a folder's path may not."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        call(f"/proc/self/fd/{handle}/rank")
    finally:
        os.close(handle)


def _called(folder: str, own: str, timeout_s: float) -> Channel:
    link = _socket()
    try:
        link.setblocking(False)  # A queue that is full stays full until all have called.
        _at(folder, link.connect)
        link.setblocking(True)
    except OSError as error:
        link.close()
        if isinstance(error, BlockingIOError):
            raise OSError("other connections fill the queue of a rank's socket") from error
        raise
    channel = Channel(link, timeout_s)
    channel.say(own)
    return channel


def _answered(
    listener: socket.socket, awaited: dict[str, int], timeout_s: float
) -> dict[int, Channel]:
    """Channels to those who have called, by the name that each has told the group.

    All of them are in the queue, with their first packet; whatever else is there, is left.
    """
    found: dict[int, Channel] = {}
    listener.setblocking(False)
    while len(found) < len(awaited):
        link, _ = listener.accept()
        channel = Channel(link, timeout_s)
        said = ""
        with suppress(RuntimeError, BlockingIOError):  # It has gone, or says nothing.
            said = channel.hear(socket.MSG_DONTWAIT)
        if said in awaited and awaited[said] not in found:
            channel.say(said)
            found[awaited[said]] = channel
        else:
            channel.drop()
    return found


class Channel:
    """Messages to and from one other rank.

    Each end takes in one thread, which also begins what it sends; another one may end that.
    """

    def __init__(self, link: socket.socket, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        wait = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, wait)
        weakref.finalize(self, link.close)
        _channels.add(self)
        # Own blocks, by size: number, and its bytes. Which of them the other end has: 1.
        self._blocks: dict[int, list[tuple[int, Tensor]]] = {}
        self._count = 0
        self._lent_fd = os.memfd_create("foldpipe-lent")
        os.ftruncate(self._lent_fd, _BLOCKS)
        self._lent = mmap.mmap(self._lent_fd, _BLOCKS)
        # The other end's, as far as they have come.
        self._their_lent: mmap.mmap | None = None
        self._theirs: dict[int, mmap.mmap] = {}
        self._arrived: dict[int, deque[_Packet]] = {}
        self._loans: dict[int, weakref.ref[memoryview]] = {}

    def say(self, name: str) -> None:
        """Sends the first packet: who this is, and which of its blocks are lent."""
        self._write(name.encode(), self._lent_fd)
        os.close(self._lent_fd)

    def drop(self) -> None:
        """Ends it before anything has been said."""
        os.close(self._lent_fd)
        self._link.close()

    def hang_up(self) -> None:
        """Ends it at both ends, for whoever waits there; forked loaders have the socket, too."""
        with suppress(OSError):  # The other end has gone.
            self._link.shutdown(socket.SHUT_RDWR)

    def hear(self, flags: int = 0) -> str:
        """Receives the other end's first packet; returns who it is."""
        data, handle = self._read(64, flags)
        if handle is None or os.fstat(handle).st_size != _BLOCKS:
            raise RuntimeError("Connection closed: the other end is no rank")
        self._their_lent = mmap.mmap(handle, _BLOCKS)
        os.close(handle)
        return data.decode(errors="replace")

    def send(self, tensor: Tensor, tag: int) -> None:
        """Copies it (contiguous, in host memory) and announces it; it may be changed at once."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        size = flat.numel()
        if size <= _SMALL:
            self.write(flat.numpy().tobytes(), tag)
            return
        self._fill(self._free_block(size), flat, tag)

    def write(self, data: bytes, tag: int) -> None:
        """A message of at most 1024 bytes."""
        self._write(_PACKET.pack(tag, _NO_BLOCK, len(data)) + data, None)

    def send_later(self, tensor: Tensor, tag: int) -> Callable[[], None]:
        """What sends it, from another thread perhaps; it must stay unchanged until then."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        return partial(self._fill, self._free_block(flat.numel()), flat, tag)

    def _fill(self, free: _Block, flat: Tensor, tag: int) -> None:
        number, block, handle = free
        size = flat.numel()
        # Tensor.copy_ of bytes takes up to three times as long. Python's lock is not held here.
        ctypes.memmove(block.data_ptr(), flat.data_ptr(), size)
        self._write(_PACKET.pack(tag, number, size), handle)
        if handle is not None:
            os.close(handle)

    def _free_block(self, size: int) -> _Block:
        """A block that nobody reads, lent now; one thread asks."""
        # Pages that nothing is written to take no memory.
        room = max(_PAGE, 1 << (size - 1).bit_length())
        blocks = self._blocks.setdefault(room, [])
        lent = self._lent
        for number, block in blocks:
            if not lent[number]:
                lent[number] = 1
                return number, block, None
        handle = os.memfd_create("foldpipe")
        try:
            os.ftruncate(handle, room)
            block = torch.frombuffer(mmap.mmap(handle, room), dtype=torch.uint8)
        except OSError:  # no memory; said as that of any other tensor
            os.close(handle)
            raise
        number = self.new_number()
        blocks.append((number, block))
        lent[number] = 1
        return number, block, handle

    def take(self, tag: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The oldest message of that tag that has not been taken; waits for it.

        The tensor lies where the sender has put it, and belongs to the caller.

        Raises:
            RuntimeError: The other end has gone, or has said nothing for the time-out.
        """
        packet = self._next(tag)
        count = prod(shape)
        data: bytearray | memoryview
        if isinstance(packet, bytes):
            size, data = len(packet), bytearray(packet)
        else:
            number, size = packet
            view = memoryview(self._theirs[number])[:size]
            lent = self._their_lent
            assert lent is not None
            self._loans[number] = weakref.ref(view, partial(_give_back, lent, number, os.getpid()))
            data = view
        if size != count * dtype.itemsize:
            raise RunError(
                f"a message of {size} bytes came where one of {count * dtype.itemsize} was "
                "expected: the ranks do not run the same program."
            )
        return torch.frombuffer(data, dtype=dtype).view(shape)

    def read(self, tag: int) -> bytes:
        """The oldest message of that tag, which was sent by ``write``; waits for it."""
        packet = self._next(tag)
        assert isinstance(packet, bytes), "a tensor came where bytes were expected"
        return packet

    def _next(self, tag: int) -> _Packet:
        arrived = self._arrived
        while not arrived.get(tag):
            self._read_announcement()
        return arrived[tag].popleft()

    def has(self, tag: int) -> bool:
        """Whether a message of that tag has arrived; waits for none."""
        arrived = self._arrived
        try:
            while not arrived.get(tag):
                self._read_announcement(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    # Blocks of memory that is shared in another way have numbers among these, and a byte each.

    def new_number(self) -> int:
        self._count += 1
        return self._count - 1

    def lend(self, number: int) -> None:
        """Notes that the other end has an own block from now on."""
        self._lent[number] = 1

    def state(self, number: int) -> int:
        """An own block's byte."""
        return self._lent[number]

    def set_state(self, number: int, state: int) -> None:
        """Sets the byte of one of the other end's blocks."""
        assert self._their_lent is not None
        self._their_lent[number] = state

    def until(self, condition: Callable[[], bool], *, at_most_s: float = math.inf) -> bool:
        """Waits for what the other end does without a message, for the time-out at most.

        Returns:
            Whether the wait is over: it has been done, or the other end has gone.
        """
        end = time.monotonic() + min(self._timeout_s, at_most_s)
        while not condition() and not self._has_gone():
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_S)
        return True

    def _has_gone(self) -> bool:
        try:
            return not self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _read_announcement(self, flags: int = 0) -> None:
        data, handle = self._read(_PACKET.size + _SMALL, flags)
        tag, number, size = _PACKET.unpack_from(data)
        if handle is not None:
            try:
                self._theirs[number] = mmap.mmap(handle, 0)
            finally:
                os.close(handle)
        packet: _Packet = data[_PACKET.size :] if number == _NO_BLOCK else (number, size)
        self._arrived.setdefault(tag, deque()).append(packet)

    def _write(self, data: bytes, handle: int | None) -> None:
        try:
            if handle is None:
                self._link.send(data)
            else:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(handle))]
                self._link.sendmsg([data], rights)
        except BlockingIOError:
            raise self.timed_out("send") from None
        except OSError as error:
            raise RuntimeError(
                f"Connection closed by peer, a rank of this machine: {error}"
            ) from error

    def _read(self, most: int, flags: int = 0) -> tuple[bytes, int | None]:
        try:
            data, extra, _, _ = self._link.recvmsg(most, _ROOM, flags)
        except BlockingIOError:
            if flags:
                raise
            raise self.timed_out("recv") from None
        except OSError as error:
            raise RuntimeError(
                f"Connection closed by peer, a rank of this machine: {error}"
            ) from error
        if not data:
            raise RuntimeError("Connection closed by peer, a rank of this machine")
        return data, _FD.unpack(extra[0][2])[0] if extra else None

    def timed_out(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"Timed out waiting {self._timeout_s * 1e3:.0f}ms for {what} operation to complete "
            "with a rank of this machine"
        )


# Of this process: they end together, with the default group.
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def hang_up() -> None:
    for channel in list(_channels):
        channel.hang_up()


_ROOM = socket.CMSG_SPACE(_FD.size) if hasattr(socket, "CMSG_SPACE") else 0


def _give_back(lent: mmap.mmap, number: int, pid: int, _: Any) -> None:
    """The last tensor in a block has gone; its sender may write to it again.

    Not if a child that was forked, a loader's process, lets go of its copy.
    """
    if os.getpid() == pid:
        lent[number] = 0
