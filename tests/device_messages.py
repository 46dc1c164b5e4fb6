"""Messages between two ranks that share a GPU, or the emulated one; what came that was not sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.runtime.messages.device_transport import DeviceTransport
from strategies.runtime.messages.exchange import Exchange
from tests.emulated_device import CUDA, emulated_device
from tests.emulated_ipc import EmulatedMemory, SharedEvent, emulated_ipc

_TURNS = 3
_TAGS = 3


@contextlib.contextmanager
def shared_gpu(folder: str | None, **options: Any) -> Iterator[EmulatedMemory | None]:
    """The machine's first GPU; where ``folder`` is given, the emulated one."""
    if folder is None:
        torch.cuda.set_device(CUDA)
        yield None
    else:
        with emulated_device(), emulated_ipc(Path(folder), **options) as memory:
            yield memory


def _message(sender: int, turn: int, tag: int, size: int) -> Tensor:
    step = 1 + 7 * sender + 3 * turn + 11 * tag
    pattern = (torch.arange(509, device=CUDA) * step).to(torch.uint8)
    return pattern.repeat(-(-size // 509))[:size]


def _without_waits(*, opened: bool) -> Any:
    """The receiver has opened the event that it waits for; the sender's are its own."""
    waits = SharedEvent.wait

    def wait(event: SharedEvent, stream: Any = None) -> None:
        if event.opened != opened:
            waits(event, stream)

    return mock.patch.object(SharedEvent, "wait", wait)


FORGETTING = {
    "contents": _without_waits(opened=True),
    "the last reader": _without_waits(opened=False),
}


def talk(folder: str | None, sizes: Sequence[int], forgetting: str | None = None) -> dict[str, Any]:
    """Each rank sends to the other, some tags ahead, and takes them in another order.

    Sends and takes have a stream each, and the hosts run ahead of both. Whichever wait is left
    out, the stream that should have waited runs first: all takes before the first message is in
    its block, or all sends before one is taken.
    """
    wrong: list[object] = []
    with shared_gpu(folder) as memory, contextlib.ExitStack() as stack:
        transport = DeviceTransport(dist.group.WORLD, CUDA, timeout_s=60.0)
        if forgetting is not None:
            stack.enter_context(FORGETTING[forgetting])
        own, words = dist.get_rank(), Exchange(dist.group.WORLD)
        sends, takes = torch.cuda.current_stream(CUDA), torch.cuda.Stream(CUDA)
        order = (sends, takes) if forgetting == "the last reader" else (takes, sends)
        near = sorted(transport._near)
        for size in sizes:
            found: list[tuple[int, int, Tensor]] = []
            for turn in range(_TURNS):
                for tag in range(_TAGS):
                    data = _message(own, turn, tag, size)
                    transport.send(data, 1 - own, tag).wait()
                    data.zero_()  # behind the copy, on the same stream
                arrivals = [
                    (tag, transport.expect((size,), torch.uint8, CUDA, 1 - own, tag))
                    for tag in reversed(range(_TAGS))
                ]
                with torch.cuda.stream(takes):
                    found += [(turn, tag, arrival.wait()) for tag, arrival in arrivals]
                # No device has done anything yet that nobody waits for, and blocks are free.
                words.everyone(turn)
            for stream in order:
                stream.synchronize()
                words.everyone(size)
            for turn, tag, tensor in found:
                if not torch.equal(tensor, _message(1 - own, turn, tag, size)):
                    wrong.append((turn, size, tag))
        for place in (torch.device("cpu"), CUDA):
            for dtype in (torch.int16, torch.bool, torch.bfloat16, torch.complex64):
                sent = (torch.arange(6).view(2, 3) + own).to(dtype).to(place)
                transport.send(sent, 1 - own, 9).wait()
                came = transport.expect((2, 3), dtype, place, 1 - own, 9).wait()
                expected = (torch.arange(6).view(2, 3) + 1 - own).to(dtype)
                if came.device != place or not torch.equal(came.cpu(), expected):
                    wrong.append((str(dtype), str(place)))
        blocks = [len(channel._own) for channel in transport._near.values()]
        transport.drain()
        transport.close()
    left = 0 if memory is None else len(memory.made) + len(memory.mapped)
    return {
        "near": near,
        "wrong": wrong,
        "blocks": blocks,
        "left": left,
        "messages": _TURNS * len(sizes) * _TAGS,
    }
