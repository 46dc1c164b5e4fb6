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

    Args:
        trainer: Whose loader gives the batch for that.
        module: The user's.
        layers: Where its layers are (``net.layers``); None to find them.
    """
    if isinstance(module, HasUnits):
        return UnitModel(module)
    from strategies.models.replay.replay_model import ReplayModel

    modes: dict[Any, Mode] = {
        TrainerFn.FITTING: "train",
        TrainerFn.VALIDATING: "validate",
        TrainerFn.TESTING: "test",
        TrainerFn.PREDICTING: "predict",
    }
    function = trainer.state.fn
    loops = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    assert function is not None
    loop: Any = loops[function]
    source = loop._data_source
    loader = source.dataloader()
    while isinstance(loader, list | tuple):
        loader = loader[0]
    plugin = trainer.precision_plugin
    batch = plugin.convert_input(first_batch(loader))
    with plugin.forward_context():  # The types are those of the steps that will run.
        return ReplayModel.probe(module, batch, mode=modes[function], chain=layers)
