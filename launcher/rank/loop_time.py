"""What a training step takes on a rank beside its instructions: Lightning's loop, data, logging.

No figure of a layer has it, and where ranks share cores it is a fifth of a small model's step.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from launcher.config import LaunchConfig
from launcher.planning.reference import reference
from launcher.rank.callbacks import pipeline
from launcher.resolve import resolve

_WARM_UPS = 2


def measure_loop(config: LaunchConfig, world: int) -> float:
    """Trains the reference model on all ranks, and leaves them connected.

    Returns this rank's CPU seconds per step beside forwards, backwards and the optimizer's update.
    """
    from launcher.rank.jobs import train

    events = os.environ.pop("FOLDPIPE_EVENTS", None)  # A terminal shows the run's own steps.
    watch = _Watch()
    try:
        with tempfile.TemporaryDirectory(prefix="foldpipe-loop-") as folder:
            train(resolve(reference(config, world)), Path(folder), None, [watch])
    finally:
        if events is not None:
            os.environ["FOLDPIPE_EVENTS"] = events
    return watch.median_s


class _Watch(Callback):
    """CPU seconds of each step, by the share of it that no instruction takes.

    CPU time does not count what a rank waits for others, on a busy machine for a core. Threads
    that compute would count, so where there are several, the main one alone is looked at.
    """

    def __init__(self) -> None:
        alone = torch.get_num_threads() == 1
        self._cpu: Callable[[], float] = time.process_time if alone else time.thread_time
        self._last: tuple[float, float] | None = None  # both clocks at the end of the step before
        self._update = self._updated = 0.0  # when the update of this step began and ended
        self._seconds: list[float] = []

    @property
    def median_s(self) -> float:
        return statistics.median(self._seconds[_WARM_UPS:])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(self._end_update)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._update = time.perf_counter()

    def _end_update(self, *_: object) -> None:
        self._updated = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, *_: object
    ) -> None:
        now = (time.perf_counter(), self._cpu())
        if self._last is not None:
            took, used = (new - old for new, old in zip(now, self._last, strict=True))
            recorder = pipeline(trainer).engine.recorder
            inside = recorder.spans(recorder.kept[-1]).busy + self._updated - self._update
            self._seconds.append(used * max(0.0, 1.0 - inside / took))
        self._last = now
