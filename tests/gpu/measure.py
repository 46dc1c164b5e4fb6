"""Short trainings through the launcher, and what the device can do at best.

Nothing here is for GPUs alone: the same functions run on a CPU with a tiny model, so that they are
known to work before somebody has a GPU.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launcher.runs import MODEL, launch

# 1.1e9 parameters: 16 layers, 2048 wide, 32 heads over 8 of keys and values.
LLAMA_1B = (
    "model=llama2_3b", "model.layers=16", "model.hidden=2048", "model.heads=32", "model.kv_heads=8",
    "model.ffn=8192", "model.vocab=32000", "model.sequence=2048",
)  # fmt: skip
TINY = ("model=tiny", *MODEL, "model.vocab=256")


@dataclass(frozen=True)
class Device:
    """Where a test runs.

    Attributes:
        accelerator: ``gpu`` or ``cpu``.
        option: A name under ``conf/hardware``; empty for that of this machine's GPU.
        model: Overrides.
    """

    accelerator: str
    option: str
    model: tuple[str, ...]

    @property
    def hardware(self) -> str:
        return self.option or gpu_option(torch.cuda.get_device_name())

    @property
    def torch(self) -> torch.device:
        return torch.device("cuda" if self.accelerator == "gpu" else "cpu")


# Words of what ``torch.cuda.get_device_name`` says.
_GPU_WORDS = {
    "h200": {"h200"},
    "h100": {"h100"},
    "a100_80g": {"a100", "80gb"},
    "a100_40g": {"a100", "40gb"},
    "v100_32g": {"v100", "32gb"},
}
GPU = Device("gpu", "", LLAMA_1B)
CPU = Device("cpu", "cpu_laptop", TINY)


def gpu_option(name: str) -> str:
    """The file under ``conf/hardware`` of a GPU that calls itself so; skips where there is none."""
    words = set(re.split(r"\W+", name.lower()))
    for option, needed in _GPU_WORDS.items():
        if words >= needed:
            return option
    pytest.skip(f"conf/hardware has no {name}")


SMALL = Device(
    "gpu",
    "",
    ("model=tiny", "model.layers=8", "model.hidden=512", "model.heads=8", "model.kv_heads=8",
     "model.ffn=1536", "model.sequence=512"),
)  # fmt: skip


def train(device: Device, folder: Path, *words: str, timeout_s: float = 1500) -> dict[str, Any]:
    """``result.json`` of a training of some steps; nothing is saved or validated."""
    run = launch(
        [
            *device.model, "data=stdlib", f"trainer.accelerator={device.accelerator}",
            f"hardware={device.hardware}", "trainer.save_last=false", "trainer.limit_val_batches=0",
            "trainer.enable_progress_bar=false", *words,
        ],
        folder,
        timeout_s=timeout_s,
    ).assert_done()  # fmt: skip
    return run.result


def matmul_peak(device: torch.device, dtype: torch.dtype, *, size: int, seconds: float) -> float:
    """FLOP/s of square matrix products when the device is as warm as training makes it.

    Over the last third of the time; before, clocks are still those of an idle device.
    """
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not times:
        _wait(device)
        begun = time.perf_counter()
        for _ in range(4):
            a @ b
        _wait(device)
        times.append((time.perf_counter() - begun) / 4)
    return 2 * size**3 / statistics.median(times[-max(1, len(times) // 3) :])


def flops_per_s(result: dict[str, Any]) -> float:
    """The model's own FLOPs per second of a rank, at the median step."""
    return float(result["model_flops_per_step"] / result["step_time_s"] / result["world_size"])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
