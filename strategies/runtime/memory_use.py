"""What a rank's memory has peaked at so far, from the best source that its device has."""

from __future__ import annotations

import resource

import torch


class MemoryUse:
    """Peak of one rank since this object was made.

    On a GPU the peak of torch's allocator on that device (other processes on it do not count). On a
    CPU, where tensors share the heap with everything else, by how much the process's largest
    resident size has grown: the interpreter and its libraries do not count, pages that were given
    back still do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else _largest_resident()

    def peak_bytes(self) -> int:
        """Bytes; never falls."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, _largest_resident() - self._before)


def _largest_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
