"""The user's LightningModule as a model that can be cut."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader

from strategies.models.replay.gate import unchanged
from strategies.models.stage_model import Mode, StageModel
from strategies.models.unit_model import HasUnits, UnitModel
from strategies.runtime.lightning.data_order import Looked
from strategies.runtime.lightning.manual_optimization import manual_model


def stage_model_of(
    trainer: pl.Trainer, module: pl.LightningModule, *, layers: str | None, looked: Looked
) -> StageModel:
    """A module that declares units as it is; any other after its step was run on shapes.

    Its layers are found unless ``layers`` says where they are (``net.layers``). ``looked`` is told
    what was read of the data for that.
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
    loaders = loop._data_source.dataloader()
    if not isinstance(loaders, CombinedLoader):  # As the loop combines them.
        loaders = CombinedLoader(loaders, "max_size_cycle" if mode == "train" else "sequential")
    batch, index = looked.first_batch(loaders)
    several = loaders._mode == "sequential" and len(loaders.flattened) > 1
    plugin = trainer.precision_plugin
    batch = plugin.convert_input(batch)
    with unchanged(module):  # The user's hooks may count, or draw.
        batch = module._on_before_batch_transfer(batch, dataloader_idx=index)
        batch = trainer.strategy.batch_to_device(batch, device=module.device, dataloader_idx=index)
    which = index if several else None
    if not module.automatic_optimization:
        with plugin.forward_context():
            return manual_model(
                trainer, module, batch, mode=mode, layers=layers, dataloader_idx=which
            )
    with plugin.forward_context():  # The types are those of the steps that will run.
        return ReplayModel.probe(module, batch, mode=mode, chain=layers, dataloader_idx=which)
