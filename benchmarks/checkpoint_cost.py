"""What a checkpoint costs: a model of 200 MB, saved with training waiting, and in a thread.

    python -m benchmarks.checkpoint_cost [FOLDER]

An MLP of 50 M fp32 parameters with Adam on one rank: 600 MB of state per checkpoint. Prints medians
of the step time without a save, the stall of a save, the steps while the thread writes, the time
until a checkpoint is committed, and what hashing takes of it; asserts nothing. On a machine that
others use, too, the CPU time of the training thread says whether the writing one is in its way.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from strategies.manifest import read_manifest, total_bytes
from strategies.runtime.lightning.strategy import PipelineStrategy

WIDTH, LAYERS, ROWS = 2048, 12, 16
SAVES, BETWEEN = 4, 8


class Model(pl.LightningModule):
    """50.4 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: tuple[Tensor], _: int) -> Tensor:
        return functional.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Times steps and saves."""

    def __init__(self, folder: Path, *, in_thread: bool) -> None:
        self._folder = folder
        self._in_thread = in_thread
        self._last = 0.0
        self._last_cpu = 0.0
        self.quiet_cpu: list[float] = []
        self.busy_cpu: list[float] = []
        self._begun = 0.0
        self.stalls: list[float] = []
        self.quiet: list[float] = []
        self.busy: list[float] = []
        self.committed: list[float] = []
        self.path: Path | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._last, self._last_cpu = time.perf_counter(), time.thread_time()
        self._writing = trainer.strategy.saver.pending is not None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        took, cpu = time.perf_counter() - self._last, time.thread_time() - self._last_cpu
        writing = trainer.strategy.saver.pending is not None
        if trainer.global_step > 3:
            whole = self._writing and writing
            (self.busy if whole else self.quiet).append(took)
            (self.busy_cpu if whole else self.quiet_cpu).append(cpu)
        if self._writing and not writing:
            self.committed.append(time.perf_counter() - self._begun)
        if trainer.global_step % BETWEEN == 0:
            self._begun = time.perf_counter()
            path = self._folder / f"step-{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            self.stalls.append(time.perf_counter() - self._begun)
            if self.path is not None:
                trainer.strategy.remove_checkpoint(self.path)
            self.path = path


def run(folder: Path, *, in_thread: bool) -> tuple[Clock, float]:
    """Trains; returns the clock and the seconds that a load takes."""
    clock = Clock(folder, in_thread=in_thread)
    data = TensorDataset(torch.randn(ROWS * (SAVES + 1) * BETWEEN, WIDTH))
    trainer = _trainer(clock, (SAVES + 1) * BETWEEN - 1, in_thread)
    trainer.fit(Model(), DataLoader(data, batch_size=ROWS))
    begun = time.perf_counter()
    trainer.strategy.load_checkpoint(str(clock.path))
    return clock, time.perf_counter() - begun


def _trainer(clock: Clock, steps: int, in_thread: bool) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        strategy=PipelineStrategy(
            pp=1, schedule="gpipe", num_microbatches=2, async_save=in_thread, check_batches=False
        ),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )


def hash_time(path: Path) -> float:
    """Seconds that SHA-256 takes over what is in memory, a file's bytes."""
    largest = max(path.iterdir(), key=lambda file: file.stat().st_size)
    data = largest.read_bytes()
    begun = time.perf_counter()
    hashlib.sha256(data).digest()
    return time.perf_counter() - begun


def write_time(path: Path, folder: Path) -> float:
    """Seconds that the file system takes for as many bytes, fsync included: the floor."""
    import os

    size = total_bytes(read_manifest(path))
    block = bytes(1 << 22)
    target = folder / "plain"
    begun = time.perf_counter()
    with target.open("wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    took = time.perf_counter() - begun
    target.unlink()
    return took


def _ms(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values) * 1e3:.0f} (max {max(values) * 1e3:.0f}, n={len(values)})"


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    folder = Path(tempfile.mkdtemp(dir=given))
    path: Path | None = None
    try:
        for in_thread in (False, True):
            clock, load = run(folder, in_thread=in_thread)
            path = clock.path
            assert path is not None
            size = total_bytes(read_manifest(path))
            print(f"async_save={str(in_thread).lower()}: {size / 1e6:.0f} MB per checkpoint")  # noqa: T201
            print(f"  step without a save, ms:      {_ms(clock.quiet)}")  # noqa: T201
            print(f"    its CPU time:               {_ms(clock.quiet_cpu)}")  # noqa: T201
            print(f"  stall of a save, ms:          {_ms(clock.stalls)}")  # noqa: T201
            print(f"  step while it writes, ms:     {_ms(clock.busy)}")  # noqa: T201
            print(f"    its CPU time:               {_ms(clock.busy_cpu)}")  # noqa: T201
            print(f"  until committed, ms:          {_ms(clock.committed or clock.stalls)}")  # noqa: T201
            print(f"  loading and verifying, ms:    {load * 1e3:.0f}")  # noqa: T201
        assert path is not None
        print(f"SHA-256 of the same bytes, ms:  {hash_time(path) * 1e3:.0f}")  # noqa: T201
        print(f"plain write and fsync, ms:      {write_time(path, folder) * 1e3:.0f}")  # noqa: T201
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
