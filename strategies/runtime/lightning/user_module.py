"""The user's LightningModule as a model that can be cut."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from strategies.models.stage_model import Mode, StageModel
from strategies.models.unit_model import HasUnits, UnitModel
from strategies.runtime.lightning.data_order import first_batch


def stage_model_of(
    trainer: pl.Trainer, module: pl.LightningModule, *, layers: str | None
) -> StageModel:
    """A module that declares units as it is; any other after its step was run on shapes.

    Its layers are found unless ``layers`` says where they are (``net.layers``).
    """
    if isinstance(module, HasUnits):
        return UnitModel(module)
    from strategies.models.replay.replay_model import ReplayModel

    modes: dict[Any, tuple[Mode, Any]] = {
        TrainerFn.FITTING: ("train", trainer.fit_loop),
        TrainerFn.VALIDATING: ("validate", trainer.validate_loop),
        TrainerFn.TESTING: ("test", trainer.test_loop),
        TrainerFn.PREDICTING: ("predict", trainer.predict_loop),
    }
    mode, loop = modes[trainer.state.fn]
    loader = loop._data_source.dataloader()
    while isinstance(loader, list | tuple):
        loader = loader[0]
    plugin = trainer.precision_plugin
    batch = plugin.convert_input(first_batch(loader))
    with plugin.forward_context():  # The types are those of the steps that will run.
        return ReplayModel.probe(module, batch, mode=mode, chain=layers)
