"""Stops training at a step that all ranks agree on, with a checkpoint, once a signal has come.

Signals reach ranks at different moments, and a rank that left a pipeline alone would leave its
peers waiting. So every rank tells all others after each step whether it has been asked, and reads
the answers after the next: by then they have arrived, nobody has waited, and all have the same.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint

from launcher.processes.preempted import StopRequest
from launcher.rank.callbacks import checkpoint_name, pipeline


class StopWhenAsked(Checkpoint):
    """Saves and ends the loop one step after a signal has reached any rank.

    Args:
        timeout_s: How long ranks wait for each other's answers.

    Attributes:
        stopped_by: Name of a signal, the same on every rank; None for training that went on.
        path: The checkpoint that was written for it.
    """

    reads_weights: ClassVar[bool] = False  # The checkpoint itself makes them whole.

    def __init__(self, folder: Path, request: StopRequest, *, timeout_s: float) -> None:
        self._folder = folder
        self._request = request
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._asked = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self.stopped_by: str | None = None
        self.path: Path | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps Lightning from putting a handler of its own around ours.

        That one broadcasts inside the handler, for which no other rank is ready.
        """
        connector = trainer._signal_connector
        connector.register_signal_handlers = _nothing  # type: ignore[method-assign]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the group of all ranks; collective."""
        if trainer.world_size > 1:
            # gloo even between GPUs: a handful of bytes that no kernel has to wait for.
            group = dist.new_group(backend="gloo", timeout=self._timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._tell()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        """At the end of a step: reads the answers of the one before, and tells this one's."""
        if trainer.fit_loop._should_accumulate():
            return
        number = self._hear()
        last = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if number == 0 or last:
            self._tell()
            return
        self.stopped_by = _NAMES[number]
        self._save(trainer)
        # Whoever preempts does not wait: no validation now, and no rest of an epoch.
        trainer.limit_val_batches = 0
        trainer.fit_loop.min_epochs = 0
        trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives the group back; collective."""
        self._hear()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _tell(self) -> None:
        asked = self._request.signal
        self._asked = torch.tensor([0 if asked is None else _NUMBERS[asked]], dtype=torch.int32)
        if self._group is not None:
            self._pending = dist.all_reduce(
                self._asked, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def _hear(self) -> int:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return int(self._asked.item())

    def _save(self, trainer: pl.Trainer) -> None:
        self.path = self._folder / checkpoint_name(trainer.global_step)
        if not pipeline(trainer).has_checkpoint(self.path):
            trainer.save_checkpoint(self.path)


_NUMBERS = {"SIGUSR1": 1, "SIGTERM": 2}
_NAMES = {number: name for name, number in _NUMBERS.items()}


def _nothing() -> None:
    pass
