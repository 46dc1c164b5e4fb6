"""Numbers on their way from the device to the host.

Reading one with ``float()`` or ``.cpu()`` waits for everything that the device has been given so
far. A copy that was started earlier is waited for alone, and usually is there already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Fetch:
    """A copy in host memory, started and not waited for; without a device the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        # Copies that do not block go to pinned memory.
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._there: Any = None
        if tensor.is_cuda:
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record(torch.cuda.current_stream(tensor.device))

    def tensor(self) -> Tensor:
        """The copy, arrived."""
        if self._there is not None:
            self._there.synchronize()
            self._there = None
        return self._copy
