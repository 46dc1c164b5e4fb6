"""Hooks of a module and of a callback: every rank calls them as stock Lightning does."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.comparison import WIDTH, Net
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


def _recording(own: type, names: Sequence[str], calls: list[str], label: str) -> type:
    """A subclass whose hooks note their names and do what they did."""

    def noting(name: str) -> Any:
        before = getattr(own, name)

        def hook(self: Any, *args: Any, **keywords: Any) -> Any:
            calls.append(f"{label}.{name}")
            return before(self, *args, **keywords)

        return hook

    return type(own.__name__, (own,), {name: noting(name) for name in names})


class Full(Net):
    """Everything that a Trainer can run."""

    def _loader(self) -> DataLoader[Any]:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return DataLoader(TensorDataset(x), batch_size=8)

    def train_dataloader(self) -> Any:
        return self._loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def _loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[0]) + 0 * self.head(batch[0]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self._loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Kept(pl.Callback):
    """With a state, which a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"one": 1}


def called(
    strategy: Mapping[str, Any] | None, of_module: Sequence[str], of_callback: Sequence[str],
    folder: str,
) -> list[str]:  # fmt: skip
    """The hooks that are called while a module is fitted, saved, evaluated and fitted further."""
    calls: list[str] = []
    kind = _recording(Full, of_module, calls, "module")
    # A list of the class: what a look at the step adds to it is taken back.
    kind.calls = calls  # type: ignore[attr-defined]
    module = kind()
    callback = _recording(Kept, of_callback, calls, "callback")()
    if strategy is not None:
        strategy = {"num_microbatches": 4, **strategy}
    options = {"max_epochs": 2, "gradient_clip_val": 1.0, "callbacks": [callback]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of hooks that do nothing
        trainer = trainer_of(strategy, **options)
        trainer.fit(module)
        trainer.save_checkpoint(f"{folder}.ckpt")
        for evaluate in (trainer.validate, trainer.test):
            evaluate(module, verbose=False)
        trainer.predict(module)
        trainer = trainer_of(strategy, **options | {"max_epochs": 3})
        trainer.fit(kind(), ckpt_path=f"{folder}.ckpt")
    if strategy is not None:
        trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return calls


# These run earlier (the loader, for the look at the first batch) or later (a checkpoint, behind the
# cut) than under stock Lightning, and as often.
ELSEWHERE = ("train_dataloader", "on_load_checkpoint", "load_state_dict")


@pytest.mark.lightning_feature(
    "module hook", "backward", "configure_callbacks", "configure_gradient_clipping",
    "configure_model", "configure_optimizers", "lr_scheduler_step", "on_after_backward",
    "on_after_batch_transfer", "on_before_backward", "on_before_batch_transfer",
    "on_before_optimizer_step", "on_before_zero_grad", "on_fit_end", "on_fit_start",
    "on_load_checkpoint", "on_predict_batch_end", "on_predict_batch_start", "on_predict_end",
    "on_predict_epoch_end", "on_predict_epoch_start", "on_predict_model_eval", "on_predict_start",
    "on_save_checkpoint", "on_test_batch_end", "on_test_batch_start", "on_test_end",
    "on_test_epoch_end", "on_test_epoch_start", "on_test_model_eval", "on_test_model_train",
    "on_test_start", "on_train_batch_end", "on_train_batch_start", "on_train_end",
    "on_train_epoch_end", "on_train_epoch_start", "on_train_start", "on_validation_batch_end",
    "on_validation_batch_start", "on_validation_end", "on_validation_epoch_end",
    "on_validation_epoch_start", "on_validation_model_eval", "on_validation_model_train",
    "on_validation_model_zero_grad", "on_validation_start", "optimizer_step",
    "optimizer_zero_grad", "predict_dataloader", "prepare_data", "setup", "teardown",
    "test_dataloader", "train_dataloader", "transfer_batch_to_device", "val_dataloader",
)  # fmt: skip
@pytest.mark.lightning_feature(
    "callback hook", "load_state_dict", "on_after_backward", "on_before_backward",
    "on_before_optimizer_step", "on_before_zero_grad", "on_fit_end", "on_fit_start",
    "on_load_checkpoint", "on_predict_batch_end", "on_predict_batch_start", "on_predict_end",
    "on_predict_epoch_end", "on_predict_epoch_start", "on_predict_start",
    "on_sanity_check_end", "on_sanity_check_start", "on_save_checkpoint", "on_test_batch_end",
    "on_test_batch_start", "on_test_end", "on_test_epoch_end", "on_test_epoch_start",
    "on_test_start", "on_train_batch_end", "on_train_batch_start", "on_train_end",
    "on_train_epoch_end", "on_train_epoch_start", "on_train_start", "on_validation_batch_end",
    "on_validation_batch_start", "on_validation_end", "on_validation_epoch_end",
    "on_validation_epoch_start", "on_validation_start", "setup", "state_dict", "teardown",
)  # fmt: skip
@pytest.mark.parametrize(
    "layout", [{"pp": 2}, pytest.param({"pp": 1, "tp": 2}, marks=pytest.mark.full)], ids=str
)
def test_hooks_are_called_as_under_stock_lightning(
    ranks: Callable[[int], Ranks], tmp_path: Path, request: pytest.FixtureRequest,
    layout: dict[str, int],
) -> None:  # fmt: skip
    marks = [mark.args for mark in request.node.iter_markers("lightning_feature")]
    hooks = {f"of_{kind.split()[0]}": names for kind, *names in marks}
    (stock,) = ranks(1).run(called, strategy=None, folder=str(tmp_path / "stock"), **hooks)
    missed = {f"module.{n}" for n in hooks["of_module"]} - {*stock}
    missed |= {f"callback.{n}" for n in hooks["of_callback"]} - {*stock}
    assert not missed
    for rank, found in enumerate(
        ranks(2).run(called, strategy=layout, folder=str(tmp_path / "pipeline"), **hooks)
    ):
        wanted = [call for call in stock if rank == 0 or call != "module.prepare_data"]
        assert Counter(found) == Counter(wanted), rank
        assert _in_place(found) == _in_place(wanted), rank


def _in_place(calls: Sequence[str]) -> list[str]:
    return [call for call in calls if call.partition(".")[2] not in ELSEWHERE]
