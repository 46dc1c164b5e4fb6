"""Clocks of a device: what the host spends on a call, and what the device does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

Call = Callable[[], object]


class Clock:
    """Times calls on one device."""

    def __init__(self, device: str, *, quick: bool) -> None:
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.gpu = self.device.type == "cuda"
        self.quick = quick

    def wait(self) -> None:
        """Returns when the device has done everything."""
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def host(self, call: Call, count: int = 300) -> dict[str, float]:
        """Seconds of the host per call, and seconds per call until all of them are done."""
        count = 3 if self.quick else count
        call()
        self.wait()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        given = time.perf_counter() - begun
        self.wait()
        return {"host_s": given / count, "done_s": (time.perf_counter() - begun) / count}

    def seconds(self, call: Call, budget_s: float = 0.02, most: int = 30) -> float:
        """Median seconds of a call; on a GPU between events, warm."""
        call()
        once = self.host(call, 1)["done_s"]
        count = 3 if self.quick else int(max(3, min(most, budget_s / max(once, 1e-6))))
        if not self.gpu:
            return self.host(call, count)["done_s"]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        self.wait()
        return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))) / 1e3

    def random(
        self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False
    ) -> torch.Tensor:
        """Normal numbers: zeros and ones are multiplied faster than data are."""
        return torch.randn(*shape, device=self.device, dtype=dtype).requires_grad_(grad)

    def warm(self, seconds: float) -> None:
        """Multiplies until the clocks are those of training."""
        if not self.gpu or self.quick:
            return
        a = self.random(8192, 8192)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            a @ a
            self.wait()

    def clocks(self) -> str:
        """Clocks and power as the driver says them now; empty where it says none."""
        if not self.gpu:
            return ""
        from tools.gpu_proof.facts import ask_driver

        return ask_driver("clocks.sm,clocks.mem,power.draw,temperature.gpu")
