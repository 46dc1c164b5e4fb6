"""The Trainer's flags: each comes to what it comes to under stock Lightning on one device."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.comparison import MICROBATCHES, WIDTH, Net, logged_rows
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Scored(Net):
    """Trained, validated, tested and asked for predictions; notes which batches it has seen."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        if norm:
            self.net.append(nn.BatchNorm1d(WIDTH))
        self.seen: list[tuple[str, int, int, bool]] = []

    def _loss(self, batch: Any, name: str) -> Tensor:
        loss = mse_loss(self.net(batch[0]), batch[0]) + 0.1 * self.head(batch[0]).square().mean()
        self.log(name, loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch, "loss")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch, "val_loss")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch, "test_loss")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note("train", batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note("validate", batch_idx)

    def _note(self, what: str, batch_idx: int) -> None:
        self.seen.append((what, self.current_epoch, batch_idx, torch.is_inference_mode_enabled()))


def rows(number: int, size: int = 8) -> DataLoader[Any]:
    x = torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(x), batch_size=size)


def run(
    strategy: Mapping[str, Any] | None, *, stops: bool = False, norm: bool = False, size: int = 8,
    **flags: Any,
) -> dict[str, Any]:  # fmt: skip
    """All that a script can see of a training, a test and predictions with these flags."""
    module = Scored(norm)
    if strategy is not None:
        strategy = {"num_microbatches": MICROBATCHES, **strategy}
    calls = [EarlyStopping("val_loss", patience=1, min_delta=100.0)] if stops else []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of some flags
        logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
        options: dict[str, Any] = {
            "max_epochs": 2, "default_root_dir": folder, "callbacks": calls,
            "logger": not flags.get("barebones") and logger,
        }  # fmt: skip
        trainer = trainer_of(strategy, **options | flags)
        trainer.fit(module, rows(32, size), rows(16, size))
        found = {
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "seen": module.seen,
            "metrics": {name: float(v) for name, v in trainer.callback_metrics.items()},
            "state": {name: value.clone() for name, value in module.state_dict().items()},
            "tested": trainer.test(module, rows(24, size), verbose=False),
            "predicted": [found.clone() for found in trainer.predict(module, rows(24, size)) or []],
        }
        if trainer.global_rank == 0:
            found["logged"] = logged_rows(logger)
            files = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.*"))
            found["files"] = sorted(files)
    if strategy is not None:
        trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.allclose(one, other, rtol=0, atol=1e-10)
    if isinstance(one, float):
        return bool(one == pytest.approx(other, abs=1e-10))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


CASES: dict[str, dict[str, Any]] = {
    "ends early": {
        "max_epochs": 4, "min_epochs": 3, "stops": True, "limit_train_batches": 3,
        "limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None,
        "log_every_n_steps": 1,
    },
    "counts steps": {
        "max_epochs": -1, "min_steps": 5, "max_steps": 7, "stops": True,
        "limit_val_batches": 0.5, "num_sanity_val_steps": -1,
    },
    "has no time": {"max_time": {"microseconds": 1}, "num_sanity_val_steps": 0},
    "is a trial": {"fast_dev_run": 2},
    "learns two batches by heart": {"overfit_batches": 2},
    "takes a part": {
        "limit_train_batches": 0.5, "val_check_interval": 0.5, "limit_test_batches": 2,
        "limit_predict_batches": 2, "check_val_every_n_epoch": 2, "log_every_n_steps": 2,
        "plugins": [DoublePrecision()],
    },
    "adds up and clips": {
        "accumulate_grad_batches": 3, "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value", "reload_dataloaders_every_n_epochs": 1,
        "enable_checkpointing": True, "detect_anomaly": True,
    },
    "is exact": {
        "deterministic": True, "benchmark": False, "inference_mode": False,
        "use_distributed_sampler": False, "gradient_clip_val": 0.01, "precision": "64-true",
    },
    "is shown": {
        "profiler": "simple", "enable_progress_bar": True, "enable_model_summary": True,
        "enable_autolog_hparams": False, "model_registry": "name",
    },
    "is bare": {"barebones": True},
}  # fmt: skip
SELDOM: dict[str, dict[str, Any]] = {
    "is looked into": {"profiler": "advanced"},
    "is nearly exact": {"deterministic": "warn", "benchmark": True},
}


@pytest.mark.lightning_feature(
    "flag", "accelerator", "accumulate_grad_batches", "barebones", "benchmark", "callbacks",
    "check_val_every_n_epoch", "default_root_dir", "detect_anomaly", "deterministic", "devices",
    "enable_autolog_hparams", "enable_checkpointing", "enable_model_summary",
    "enable_progress_bar", "fast_dev_run", "gradient_clip_algorithm", "gradient_clip_val",
    "inference_mode", "limit_predict_batches", "limit_test_batches", "limit_train_batches",
    "limit_val_batches", "log_every_n_steps", "logger", "max_epochs", "max_steps", "max_time",
    "min_epochs", "min_steps", "model_registry", "num_sanity_val_steps", "overfit_batches",
    "plugins", "precision", "profiler", "reload_dataloaders_every_n_epochs", "strategy",
    "use_distributed_sampler", "val_check_interval",
)  # fmt: skip
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in SELDOM)]
)
def test_flags_come_to_what_they_come_to_under_stock_lightning(
    ranks: Callable[[int], Ranks], case: str, request: pytest.FixtureRequest
) -> None:
    flags = (CASES | SELDOM)[case]
    (stock,) = ranks(1).run(run, strategy=None, **flags)
    for rank, found in enumerate(ranks(2).run(run, strategy={"pp": 2}, devices=2, **flags)):
        assert stock["steps"] and stock["seen"], "nothing was trained"
        different = [name for name in found if not equal(stock[name], found[name])]
        assert not different, (rank, {name: (stock[name], found[name]) for name in different})


def run_on_nodes() -> dict[str, Any]:
    """Each rank is the only one of its node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NODE_RANK", os.environ["RANK"])
        patch.setenv("LOCAL_RANK", "0")
        return run({"pp": 2}, num_nodes=2, devices=1, max_epochs=1)


@pytest.mark.full
@pytest.mark.lightning_feature("flag", "num_nodes")
def test_two_nodes_train_as_one_device(ranks: Callable[[int], Ranks]) -> None:
    (stock,) = ranks(1).run(run, strategy=None, max_epochs=1)
    for found in ranks(2).run(run_on_nodes):
        different = [name for name in found if not equal(stock[name], found[name])]
        assert not different, {name: (stock[name], found[name]) for name in different}


@pytest.mark.lightning_feature(
    "flag", "sync_batchnorm",
    refused="sync_batchnorm=True lets batch norms take their mean and variance over dp=2 replicas",
    fix="Use GroupNorm or LayerNorm, or Trainer(strategy='ddp', sync_batchnorm=True).",
)  # fmt: skip
def test_batch_norms_over_replicas_are_refused(
    ranks: Callable[[int], Ranks], refusal: Callable[[BaseException], None]
) -> None:
    flags = {"norm": True, "sync_batchnorm": True}
    for error in ranks(2).refusals(run, strategy={"pp": 1, "dp": 2}, **flags):
        refusal(error)


def test_every_flag_that_is_marked_is_one_that_a_case_sets() -> None:
    own = test_flags_come_to_what_they_come_to_under_stock_lightning.pytestmark
    (marked,) = (mark.args[1:] for mark in own if mark.name == "lightning_feature")
    always = {"accelerator", "callbacks", "default_root_dir", "devices", "logger", "strategy"}
    cases = {flag for flags in CASES.values() for flag in flags} - {"stops"}
    assert set(marked) == always | cases
