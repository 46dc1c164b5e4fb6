"""CUDA IPC on the emulated device: memory and events that processes share.

    with emulated_device(), emulated_ipc(tmp_path): ...

Device memory is a file that both processes have mapped. An event between processes is a file, too:
how often it has been recorded, and what has been passed and is wanted of that. A process has a
thread that does the work of its streams up to an event only when another process waits for it. So
a wait that is forgotten reads what was in the block before: NaN, or the message before.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from strategies.runtime.messages import device_memory
from tests import emulated_device
from tests.emulated_device import DeviceTensor, Event, Stream, nonsense

_HANDLE = 64
_LONGEST_WAIT_S = 60.0
_LOOK_S = 5e-4


class EmulatedMemory:
    """What the driver does for one process."""

    def __init__(self, folder: Path, *, shares: bool = True) -> None:
        self.folder = folder
        self.shares = shares
        self.made: dict[int, Path] = {}  # own memory that has not been freed, by its address
        self.mapped: set[int] = set()  # other processes' memory
        self._memory: dict[int, Tensor] = {}

    def allocate(self, size: int) -> tuple[int, bytes]:
        if not self.shares:
            raise RuntimeError("cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED (801)")
        path = self.folder / f"memory-{os.urandom(8).hex()}"
        path.write_bytes(bytes(size))
        pointer = self._map(path)
        nonsense(self._memory[pointer].view(torch.float32))
        self.made[pointer] = path
        return pointer, _handle(path)

    def free(self, pointer: int) -> None:
        self.made.pop(pointer).unlink()

    def open_handle(self, handle: bytes) -> int:
        pointer = self._map(_path(self.folder, handle))
        self.mapped.add(pointer)
        return pointer

    def close_handle(self, pointer: int) -> None:
        self.mapped.remove(pointer)

    def tensor(self, pointer: int, size: int, device: torch.device) -> Tensor:
        assert self._memory[pointer].numel() == size
        return DeviceTensor(self._memory[pointer])

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        self._memory[memory.data_ptr()] = memory
        return memory.data_ptr()


def _handle(path: Path) -> bytes:
    return path.name.encode().ljust(_HANDLE, b"\0")


def _path(folder: Path, handle: bytes) -> Path:
    assert len(handle) == _HANDLE
    return folder / handle.rstrip(b"\0").decode()


_RECORDED, _PASSED, _WANTED = range(3)


class SharedEvent:
    """``torch.cuda.Event(interprocess=True)``, at either end; ``opened`` by its handle or made."""

    def __init__(self, path: Path, device: _Waited, *, opened: bool) -> None:
        self.opened = opened
        self._path = path
        self._device = device
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        # Of the latest record, if it was here: its stream, and the work's number.
        self._own: tuple[Stream, int] | None = None

    def ipc_handle(self) -> bytes:
        return _handle(self._path)

    def record(self, stream: Stream) -> None:
        self._words[_RECORDED] += 1
        count = self._words[_RECORDED]

        def passed() -> None:
            self._words[_PASSED] = count

        self._own = (stream, stream.give(passed))
        self._device.recorded[self] = None

    def help(self) -> None:
        """Does what another process waits for, and what has been given behind that."""
        assert self._own is not None
        stream, number = self._own
        if self._words[_WANTED] > self._words[_PASSED]:
            stream.advance(number)

    def query(self) -> bool:
        """A device goes on by itself; so does this one when asked."""
        self._words[_WANTED] = max(self._words[_WANTED], self._words[_RECORDED])
        return bool(self._words[_PASSED] >= self._words[_RECORDED])

    def synchronize(self) -> None:
        self._reach(self._words[_RECORDED])

    def wait(self, stream: Stream | None = None) -> None:
        """Binds to the latest record at this moment; one that comes later does not count."""
        count = self._words[_RECORDED]
        (stream or emulated_device.current_stream()).give(lambda: self._reach(count))

    def _reach(self, count: int) -> None:
        until = time.monotonic() + _LONGEST_WAIT_S
        while self._words[_PASSED] < count:
            # Anew each time: the other end may write a smaller number in between.
            self._words[_WANTED] = max(self._words[_WANTED], count)
            assert time.monotonic() < until, "an event of another process has not passed"
            time.sleep(_LOOK_S)


class _Waited:
    """The thread that does what other processes wait for."""

    def __init__(self) -> None:
        self.recorded: dict[SharedEvent, None] = {}  # all that ever were, in this process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.wait(_LOOK_S):
            for event in list(self.recorded):
                event.help()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@contextlib.contextmanager
def emulated_ipc(
    folder: Path, *, uuid: str = "GPU-0", shares: bool = True
) -> Iterator[EmulatedMemory]:
    """Inside ``emulated_device``: ``folder`` is the GPU's, for all processes that use it."""
    memory = EmulatedMemory(folder, shares=shares)
    device = _Waited()
    plain = torch.cuda.Event

    def event(*, interprocess: bool = False, **options: bool) -> object:
        if not interprocess:
            return plain(**options)
        path = folder / f"event-{os.urandom(8).hex()}"
        path.write_bytes(struct.pack("3q", 0, 0, 0))
        return SharedEvent(path, device, opened=False)

    def opened(_: torch.device, handle: bytes) -> SharedEvent:
        return SharedEvent(_path(folder, handle), device, opened=True)

    event.from_ipc_handle = opened  # type: ignore[attr-defined]
    properties = SimpleNamespace(uuid=uuid)
    wait_event = Stream.wait_event

    def wait(stream: Stream, event: Any) -> None:
        if isinstance(event, SharedEvent):
            event.wait(stream)
        else:
            wait_event(stream, event)

    def passed(event: Event) -> bool:
        event.synchronize()  # A device goes on by itself.
        return True

    try:
        with (
            mock.patch.multiple(
                device_memory,
                allocate=memory.allocate,
                free=memory.free,
                open_handle=memory.open_handle,
                close_handle=memory.close_handle,
                mapped=memory.tensor,
            ),
            mock.patch.multiple(
                torch.cuda, Event=event, get_device_properties=lambda _: properties
            ),
            mock.patch.object(Stream, "wait_event", wait),
            mock.patch.object(Event, "query", passed),
        ):
            yield memory
    finally:
        device.end()
