"""Small facts that all ranks of a pipeline share once per step, without a stall.

Every rank contributes when its last forward has ended; the answers are read at the end of its list.
By then every contribution is on its way: a rank's last backward depends on forwards of all others.
So the loss and the logged metrics are on every rank, and the batch's identity is checked, at the
price of one small asynchronous all-gather.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_START_BYTES = 4096


class Bulletin:
    """One all-gather of JSON per step inside one pipeline."""

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self._group = group
        self._size = size
        self._capacity = _START_BYTES
        self._pending: deque[tuple[dist.Work, list[Tensor], bytes]] = deque()
        self._alone: deque[Any] = deque()

    def post(self, payload: Any) -> None:
        """Contributes; returns at once."""
        if self._group is None:
            self._alone.append(payload)
            return
        data = json.dumps(payload).encode()
        self._pending.append((*self._gather(data), data))

    def read(self) -> list[Any]:
        """All ranks' contributions, by pipeline rank; of the first post that nobody has read."""
        if self._group is None:
            return [self._alone.popleft()]
        work, gathered, data = self._pending.popleft()
        work.wait()
        longest = max(int.from_bytes(_raw(item[:8]), "little") for item in gathered)
        if longest + 8 > gathered[0].numel():
            # Everybody sees the same lengths, so everybody repeats it with more room.
            while longest + 8 > self._capacity:
                self._capacity *= 2
            work, gathered = self._gather(data)
            work.wait()
        return [_decode(item) for item in gathered]

    def peek(self, count: int) -> Callable[[], list[list[Any]]]:
        """What the last post says, to be looked at whenever somebody likes, or never.

        It waits for it then, alone, and leaves it to be read. Of each list that was contributed it
        has the first ``count`` entries, which are numbers or null.
        """
        if self._group is None:
            last = self._alone[-1]
            return lambda: [last[:count]]
        work, gathered, _ = self._pending[-1]

        def look() -> list[list[Any]]:
            work.wait()
            texts = [_raw(item[8:]).lstrip(b"[").split(b",", count)[:count] for item in gathered]
            return [[json.loads(word) for word in text] for text in texts]

        return look

    def _gather(self, data: bytes) -> tuple[dist.Work, list[Tensor]]:
        framed = len(data).to_bytes(8, "little") + data
        own = torch.zeros(self._capacity, dtype=torch.uint8)
        visible = framed[: self._capacity]
        own[: len(visible)] = torch.frombuffer(bytearray(visible), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        assert work is not None
        return work, gathered


def _raw(tensor: Tensor) -> bytes:
    return bytes(tensor.numpy().tobytes())


def _decode(tensor: Tensor) -> Any:
    data = _raw(tensor)
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])
