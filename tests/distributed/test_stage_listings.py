"""Hooks that list the parameters of a module of which each rank has some units: named, once."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.test_training_details import Units
from tests.ranks.fit import trainer_of

pytestmark = pytest.mark.distributed


def _norm(module: Any) -> float:
    return math.sqrt(sum(float(p.detach().square().sum()) for p in module.parameters()))


class Norm(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        _norm(module)


class Teacher(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.copy = copy.deepcopy(module.units)

    def on_train_batch_end(self, *_: Any) -> None:
        assert _norm(self.copy) > 0


class Reads(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
        module.units.state_dict()


class Clamp(Callback):
    reads_weights = False

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data.clamp_(-1, 1)


class Each(Callback):
    """What torch and Lightning do to each parameter, what a stage has of its own, and the whole."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.freeze()
        module.unfreeze()
        module.train()
        module.double()

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.zero_grad()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        whole = trainer.strategy.full_state_dict(everywhere=True)
        assert len(whole) == 16
        trainer.save_checkpoint(f"{trainer.default_root_dir}/each.ckpt")


class Own(Units):
    def on_train_epoch_end(self) -> None:
        _norm(self)


class Penalty(Units):
    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        own = [p.square().sum() for p in self.parameters() if p.numel()]
        return super().pipeline_result(tensors, batch, batch_idx, mode) + 0 * sum(own)


KINDS: dict[str, tuple[type[Units], Any]] = {
    "a callback": (Units, Norm),
    "a copy": (Units, Teacher),
    "a part": (Units, Reads),
    "a function": (Units, lambda: LambdaCallback(on_train_batch_start=lambda t, m, *_: _norm(m))),
    "the module": (Own, None),
    "the step": (Penalty, None),
    "each by itself": (Units, Clamp),
    "the whole": (Units, Each),
}


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def said(kind: str, layout: dict[str, Any], folder: str) -> list[str]:
    made, callback = KINDS[kind]
    logger, heard = logging.getLogger("strategies.runtime.lightning.hooks.hook_watch"), Heard()
    logger.addHandler(heard)
    x, y = torch.linspace(-1, 1, 256, dtype=torch.float64).view(2, 32, 4)
    callbacks: list[pl.Callback] = [] if callback is None else [callback()]
    trainer = trainer_of(
        {"num_microbatches": 2, **layout},
        max_epochs=2,
        callbacks=callbacks,
        default_root_dir=folder,
    )
    try:
        trainer.fit(made(), DataLoader(TensorDataset(x, y), batch_size=8))
    finally:
        logger.removeHandler(heard)
    return heard.said


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("a callback", "Norm.on_train_batch_end"),
        ("a copy", "Teacher.on_train_start"),
        ("a part", "Reads.on_before_optimizer_step"),
        ("a function", "LambdaCallback.on_train_batch_start"),
        ("the module", "Own.on_train_epoch_end"),
    ],
)
def test_a_hook_that_sees_its_stages_alone_is_named_once(
    ranks: Any, tmp_path: Any, kind: str, label: str
) -> None:
    first, second = ranks(2).run(said, kind=kind, layout={"pp": 2}, folder=str(tmp_path))
    assert second == []
    (message,) = first
    assert message.startswith(f"{label} lists parameters of ")
    assert "on 2 ranks" in message
    assert "4 of 8 units (units.0, units.1, units.2, ...)" in message
    assert "full_state_dict(everywhere=True)" in message


def test_a_step_that_lists_parameters_is_named(ranks: Any, tmp_path: Any) -> None:
    first, last = ranks(2).run(said, kind="the step", layout={"pp": 2}, folder=str(tmp_path))
    assert first == []
    assert [message.split()[0] for message in last] == ["Penalty.pipeline_result"]


@pytest.mark.parametrize("kind", ["each by itself", "the whole"])
def test_what_is_right_with_the_parameters_of_a_stage_is_not_named(
    ranks: Any, tmp_path: Any, kind: str
) -> None:
    assert ranks(2).run(said, kind=kind, layout={"pp": 2}, folder=str(tmp_path)) == [[], []]
