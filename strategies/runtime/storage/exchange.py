"""Small JSON messages between all ranks, on a communicator of their own.

Nothing else uses that communicator, so a thread may wait on it while training goes on: gloo gives
every group threads and connections of its own.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Collective calls, made by all ranks in the same order."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Args: group: All ranks, over gloo; None for a single process."""
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def everyone(self, payload: Any) -> list[Any]:
        """What each rank has said, on all of them."""
        if self._group is None:
            return [payload]
        own, longest, lengths = self._frame(payload)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(found, own, group=self._group)
        return [_decode(item, length) for item, length in zip(found, lengths, strict=True)]

    def first_hears(self, payload: Any) -> list[Any]:
        """What each rank has said, on rank 0; an empty list on the others."""
        if self._group is None:
            return [payload]
        own, longest, lengths = self._frame(payload)
        if self.rank > 0:
            dist.gather(own, dst=0, group=self._group)
            return []
        found = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        dist.gather(own, found, dst=0, group=self._group)
        return [_decode(item, length) for item, length in zip(found, lengths, strict=True)]

    def first_says(self, payload: Any) -> Any:
        """What rank 0 has said."""
        if self._group is None:
            return payload
        data = _encode(payload if self.rank == 0 else None)
        length = torch.tensor(data.numel())
        dist.broadcast(length, src=0, group=self._group)
        if self.rank > 0:
            data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._group)
        return _decode(data, int(length))

    def _frame(self, payload: Any) -> tuple[Tensor, int, list[int]]:
        data = _encode(payload)
        counts = [torch.zeros((), dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor(data.numel()), group=self._group)
        lengths = [int(count) for count in counts]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: data.numel()] = data
        return padded, max(lengths), lengths


def _encode(payload: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(payload).encode()), dtype=torch.uint8)


def _decode(data: Tensor, length: int) -> Any:
    return json.loads(data[:length].numpy().tobytes())
