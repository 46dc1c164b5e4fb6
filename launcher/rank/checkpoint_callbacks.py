"""When checkpoints are written, and which stay: regular ones, the last, one when asked to stop.

Signals reach ranks at different moments, and a rank that left a pipeline alone would leave its
peers waiting. So every rank tells all others after each step whether it has been asked, and reads
the answers after the next: by then they have arrived, nobody has waited, and all have the same.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loops.evaluation_loop import RestartStage

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

    reads_weights: ClassVar[bool] = False  # The checkpoint itself makes them whole.

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
        self.saved_at = 0.0  # of time.monotonic()

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

    def save(self, trainer: pl.Trainer) -> None:
        """One between the regular ones; collective."""
        if trainer.global_step not in self._scores:
            self._save(trainer, None)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        cut_short = trainer.limit_val_batches == 0
        if cut_short or not self._keep_best or trainer.sanity_checking or trainer.state.fn != "fit":
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
        self.saved_at = time.monotonic()
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


class DueValidation(pl.Callback):
    """Runs the validation that was due when a checkpoint was written, before the next step.

    A checkpoint of a step is written before the validation of that step, which Lightning takes for
    done when it goes on from there: its figures would be missing, and what always fails in it would
    fail at another step after every restart.
    """

    reads_weights: ClassVar[bool] = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Runs when the loops have found out where they go on."""
        loop = trainer.fit_loop.epoch_loop
        if loop.restarted_on_train_batch_end:
            loop.val_loop.batch_progress.reset_on_run()
            # "Goes back and finishes": of a validation of which nothing has been done, all.
            loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION


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
    """Saves and ends the loop one step after a signal has reached any rank, or saves by time.

    A validation is ended as well, one batch after the signal, where all replicas have as many
    batches: a scheduler's patience is shorter than a real validation.

    Args:
        timeout_s: How long ranks wait for each other's answers.
        every_s: Seconds of rank 0 between two checkpoints of ``regular``; None for none by time.

    Attributes:
        stopped_by: Name of a signal, the same on every rank; None for training that went on.
        path: The checkpoint that was written for it.
    """

    reads_weights: ClassVar[bool] = False  # The checkpoint itself makes them whole.

    def __init__(
        self,
        folder: Path,
        request: StopRequest,
        *,
        timeout_s: float,
        every_s: float | None = None,
        regular: RegularCheckpoints | None = None,
    ) -> None:
        self._folder = folder
        self._request = request
        self._timeout = timedelta(seconds=timeout_s)
        self._every_s = every_s
        self._regular = regular
        self._asked_at = 0.0
        self._owed = False
        self._group: dist.ProcessGroup | None = None
        self._asked = torch.zeros(2, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._validations: dict[tuple[float, ...], bool] = {}
        self._listens = False
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
        self._asked_at = time.monotonic()
        self._tell(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        """At the end of a step: reads the answers of the one before, and tells this one's."""
        if trainer.fit_loop._should_accumulate():
            return
        number, due = self._hear()
        last = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if number == 0 or last:
            if (due or self._owed) and not last and self._regular is not None:
                self._regular.save(trainer)
                self._owed = False
            self._tell(trainer)
            return
        self._end(trainer, number)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Agrees whether this validation can be ended early; collective the first time."""
        self._listens = False
        if trainer.sanity_checking or trainer.state.fn != "fit" or self.stopped_by is not None:
            return
        counts = tuple(float(count) for count in trainer.num_val_batches)
        if counts not in self._validations:
            self._validations[counts] = self._same_everywhere(sum(counts))
        self._listens = self._validations[counts]

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        if not self._listens:
            return
        number, due = self._hear()
        if number == 0:
            self._owed = self._owed or due  # at the end of the next step
            self._tell(trainer)
            return
        self._end(trainer, number)
        # What a loader says at its end: the loop goes on behind its last batch.
        raise StopIteration

    def _same_everywhere(self, count: float) -> bool:
        if not math.isfinite(count):
            return False
        if self._group is None:
            return True
        most = torch.tensor([count, -count], dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return bool(most[0] == -most[1])

    def _end(self, trainer: pl.Trainer, number: int) -> None:
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

    def _tell(self, trainer: pl.Trainer) -> None:
        asked = self._request.signal
        number = 0 if asked is None else _NUMBERS[asked]
        self._asked = torch.tensor([number, self._due(trainer)], dtype=torch.int32)
        if self._group is not None:
            self._pending = dist.all_reduce(
                self._asked, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def _hear(self) -> tuple[int, bool]:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        number, due = self._asked.tolist()
        return number, bool(due)

    def _due(self, trainer: pl.Trainer) -> bool:
        """Whether it is time for a checkpoint, by the clock of rank 0."""
        if self._every_s is None or self._regular is None or not trainer.is_global_zero:
            return False
        now = time.monotonic()
        if now - max(self._asked_at, self._regular.saved_at) < self._every_s:
            return False
        self._asked_at = now
        return True

    def _save(self, trainer: pl.Trainer) -> None:
        self.path = self._folder / checkpoint_name(trainer.global_step)
        if not pipeline(trainer).has_checkpoint(self.path):
            trainer.save_checkpoint(self.path)


_NUMBERS = {"SIGUSR1": 1, "SIGTERM": 2, "SIGHUP": 3, "SIGINT": 4}
_NAMES = {number: name for name, number in _NUMBERS.items()}


def _nothing() -> None:
    pass


def checkpoint_name(step: int) -> str:
    """``step-00000060.ckpt``: a name that sorts by step."""
    return f"step-{step:08d}.ckpt"
