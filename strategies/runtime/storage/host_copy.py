"""A copy of pieces in host memory, so that training may go on while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from strategies.runtime.storage.piece import Piece


class HostCopy:
    """Buffers that are kept from one copy to the next: fresh memory costs more than the copy.

    Takes as much host memory as this rank writes; pinned where the pieces are on a GPU.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """The pieces as they are now; valid until the next call."""
        known, self._buffers = self._buffers, {}
        copies = {}
        devices = set()
        for name, piece in pieces.items():
            source = piece.tensor
            buffer = known.pop(name, None)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=True)
            if source.is_cuda:
                devices.add(source.device)
            self._buffers[name] = buffer
            copies[name] = replace(piece, tensor=buffer)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies
