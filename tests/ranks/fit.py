"""One short training on a rank of the tests: in a pipeline, or under stock Lightning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from strategies.runtime.lightning.strategy import PipelineStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class SaveAt(Callback):
    """Saves inside the loop, as ModelCheckpoint does."""

    reads_weights = False  # Saving makes them whole first.

    def __init__(self, step: int, path: str) -> None:
        self._step = step
        self._path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self._path)


class Losses(Callback):
    """A metric behind every batch."""

    reads_weights = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics[self.name]))


@dataclass
class Fit:
    """A training that has ended; its engine is open until the block behind ``with fit(...)`` ends.

    Attributes:
        losses: What ``losses=`` has named, of each batch.
    """

    trainer: pl.Trainer
    module: pl.LightningModule
    losses: list[float] = field(default_factory=list)

    @property
    def strategy(self) -> Any:
        return self.trainer.strategy

    @property
    def engine(self) -> Any:
        return self.strategy.engine

    @property
    def where(self) -> Any:
        """The coordinates of this rank."""
        return self.strategy.coordinates

    @property
    def metrics(self) -> dict[str, float]:
        """All that callbacks decide by."""
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    @property
    def weights(self) -> dict[str, Tensor]:
        """Copies in host memory: of all parameters, or of this rank's, as the module has them."""
        return {n: p.detach().cpu().clone() for n, p in self.module.named_parameters()}

    @property
    def shards(self) -> dict[str, Any]:
        """How parameters are cut over the ranks of tp, by name."""
        return dict(self.engine.model.shards)

    @property
    def program(self) -> Any:
        """What this rank has run in each step."""
        return self.engine.programs.train.ranks[self.where.pp_rank]


Given = Mapping[str, Any] | PipelineStrategy | None  # its keywords, or itself; None for stock


def trainer_of(strategy: Given, **trainer: Any) -> pl.Trainer:
    """A quiet Trainer, in 64 bits if nothing else is asked for."""
    options = QUIET | {"precision": "64-true"} | trainer
    if "plugins" in options:
        del options["precision"]
    if strategy is None:
        return pl.Trainer(**{"devices": 1} | options)
    if options["accelerator"] == "gpu":
        options = {"devices": 1} | options
    if isinstance(strategy, Mapping):
        strategy = PipelineStrategy(**{"timeout_s": 60, **strategy})
    return pl.Trainer(**options, strategy=strategy)


@contextmanager
def fit(
    module: pl.LightningModule,
    data: Any = None,
    validation: Any = None,
    *,
    strategy: Given,
    resume: str | None = None,
    losses: str | None = None,
    **trainer: Any,
) -> Iterator[Fit]:
    """Trains a module; what follows in the block looks at what it has come to.

    Args:
        module: Made on this rank, as a user's script does.
        data: A loader, or a data module.
        validation: A loader.
        strategy: Keywords of `PipelineStrategy`, or one; None for stock Lightning on one device.
        resume: A checkpoint to begin with.
        losses: The metric that ``Fit.losses`` has of each batch.
        trainer: Further keywords of the Trainer.
    """
    noted = [] if losses is None else [Losses(losses)]
    trainer["callbacks"] = [*noted, *trainer.get("callbacks", ())]
    made = trainer_of(strategy, **trainer)
    made.fit(module, data, validation, ckpt_path=resume)
    yield Fit(made, module, noted[0].values if noted else [])
    if strategy is not None:
        made.strategy.engine.close()  # type: ignore[attr-defined]
