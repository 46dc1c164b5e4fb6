"""Which checkpoints of a run stay: the newest, and those with the best validation."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from launcher.rank.callbacks import checkpoint_name, pipeline
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
        """Saves if this was one of the best."""
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
