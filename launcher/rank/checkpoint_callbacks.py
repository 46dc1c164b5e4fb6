"""When checkpoints are written, and which stay: regular ones, the last, one when asked to stop.

Signals reach ranks at different moments, and a rank that left a pipeline alone would leave its
peers waiting. So every rank tells all others after each step whether it has been asked, and reads
the answers after the next: by then they have arrived, nobody has waited, and all have the same.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint

from launcher.processes.preempted import StopRequest
from launcher.rank.callbacks import pipeline
from strategies.errors import PlanError
from strategies.manifest import UNFINISHED

Mode = Literal["min", "max"]


def surplus(
    scores: Mapping[int, float | None],
    *,
    keep_last: int | None,
    keep_best: int,
    mode: Mode,
) -> list[int]:
    """Steps whose checkpoints may go.

    ``scores``: per step with a checkpoint what its validation gave, None where there was none.
    ``keep_last``: number of newest steps to keep; None for all.
    ``keep_best``: number of best ones to keep besides; of equal ones the earliest.

    >>> surplus({10: 3.0, 20: 1.0, 30: 2.0, 40: None}, keep_last=1, keep_best=1, mode="min")
    [10, 30]
    """
    if keep_last is None:
        return []
    stay = {*sorted(scores)[-keep_last:], *_best(scores, mode, keep_best)}
    return [step for step in sorted(scores) if step not in stay]


def _best(scores: Mapping[int, float | None], mode: Mode, count: int) -> list[int]:
    sign = 1.0 if mode == "min" else -1.0
    rated = sorted((sign * score, step) for step, score in scores.items() if score is not None)
    return [step for _, step in rated[:count]]


class RegularCheckpoints(Checkpoint):
    """Saves every few steps and after each of the best validations; then the surplus goes.

    An old checkpoint is deleted only when the new one is committed (the strategy waits for that).
    A checkpoint belongs to the best by the validation of that very step, not by an earlier one.

    Args:
        every: Steps between checkpoints; None for none between.
        monitor: Name of a logged figure of the validation.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int | None,
        keep_last: int | None,
        keep_best: int,
        monitor: str,
        mode: Mode,
    ) -> None:
        self._folder = folder
        self._every = every
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._monitor = monitor
        self._mode: Mode = mode
        self._scores: dict[int, float | None] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Clears away what a killed run has left half-written."""
        if trainer.is_global_zero:
            for path in self._folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(path, ignore_errors=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        step = trainer.global_step
        due = self._every is not None and step % self._every == 0
        if due and step not in self._scores and not trainer.fit_loop._should_accumulate():
            self._save(trainer, None)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._keep_best or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self._monitor not in trainer.callback_metrics:
            known = ", ".join(sorted(trainer.callback_metrics))
            raise PlanError(
                f"trainer.monitor={self._monitor} is not logged; these are: {known}. "
                "Try one of them, or trainer.keep_best=0."
            )
        score = float(trainer.callback_metrics[self._monitor])
        if math.isnan(score):
            return
        rated = {**self._scores, trainer.global_step: score}
        if trainer.global_step in _best(rated, self._mode, self._keep_best):
            self._save(trainer, score)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counts the last checkpoint of a run, which another callback has written."""
        if pipeline(trainer).has_checkpoint(self._path(trainer.global_step)):
            self._scores.setdefault(trainer.global_step, None)
            self._prune(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"folder": str(self._folder), "scores": dict(self._scores)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with it, where it is the same folder: another run's checkpoints stay."""
        if state_dict["folder"] == str(self._folder):
            self._scores = dict(state_dict["scores"])

    def _path(self, step: int) -> Path:
        return self._folder / checkpoint_name(step)

    def _save(self, trainer: pl.Trainer, score: float | None) -> None:
        step = trainer.global_step
        self._scores[step] = score
        if not pipeline(trainer).has_checkpoint(self._path(step)):
            trainer.save_checkpoint(self._path(step))
        self._prune(trainer)

    def _prune(self, trainer: pl.Trainer) -> None:
        old = surplus(
            self._scores, keep_last=self._keep_last, keep_best=self._keep_best, mode=self._mode
        )
        for step in old:
            del self._scores[step]
            trainer.strategy.remove_checkpoint(self._path(step))


class LastCheckpoint(Checkpoint):
    """Writes a checkpoint of the last step, inside the loop, where resuming finds its place.

    Lightning runs checkpoint callbacks after all others: by then a timer has spoken.
    """

    reads_weights = False  # The checkpoint itself makes them whole.

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path: Path | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        loop = trainer.fit_loop
        enough = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        last_epoch = (
            trainer.max_epochs is not None
            and trainer.max_epochs != -1
            and trainer.current_epoch + 1 >= trainer.max_epochs
            and loop.epoch_loop.batch_progress.is_last_batch
        )
        if enough or last_epoch or trainer.should_stop:
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        path = self._folder / checkpoint_name(trainer.global_step)
        if not pipeline(trainer).has_checkpoint(path):
            trainer.save_checkpoint(path)
        self.path = path


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


def checkpoint_name(step: int) -> str:
    """``step-00000060.ckpt``: a name that sorts by step."""
    return f"step-{step:08d}.ckpt"
