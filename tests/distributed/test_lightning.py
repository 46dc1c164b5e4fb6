"""Lightning's own features on a pipeline: hooks, callbacks, evaluation, and clear refusals."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from strategies.errors import ModelError, PlanError
from strategies.runtime.engine import rank_passes
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks.fit import QUIET, trainer_of
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Plain(pl.LightningModule):
    """An ordinary module: no pipeline method, no base class of ours."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


class Wide(nn.Module):
    """Hands on two tensors, one of them an integer mask without gradient."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if mask is None:
            mask = (x[:, :1] > 0).long()
        return torch.tanh(self.linear(x)) * (mask + 1), mask


class Masked(pl.LightningModule):
    """Declares units that hand on several tensors; its first unit is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.units = nn.ModuleList([Wide(i == 0) for i in range(4)])
        self.units[0].requires_grad_(False)

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [(f"units.{i}", unit) for i, unit in enumerate(self.units)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        loss = functional.mse_loss(tensors[0], batch[1])
        self.log("train_loss", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tensors = self.pipeline_inputs(batch)
        for unit in self.units:
            tensors = unit(*tensors)
        return self.pipeline_result(tensors, batch, batch_idx, "train")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad] or
                               self.parameters(), lr=0.1)  # fmt: skip


def _loader(rows: int = 32, **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, 6, generator=generator, dtype=torch.float64).unbind()
    return DataLoader(TensorDataset(x, y), batch_size=8, **options)


def _trainer(strategy: PipelineStrategy | None, **options: Any) -> pl.Trainer:
    return trainer_of(strategy, **{"max_epochs": 3, **options})


def fit(kind: str, pipelined: bool, **strategy_options: Any) -> dict[str, Any]:
    module: Any = {"plain": Plain, "masked": Masked}[kind]()
    strategy = None
    if pipelined:
        strategy = PipelineStrategy(
            pp=2, schedule="1f1b", num_microbatches=4, timeout_s=60, **strategy_options
        )
    trainer = _trainer(strategy)
    validation = _loader(16) if kind == "plain" else None
    trainer.fit(module, _loader(), validation)
    result = {
        "parameters": {n: p.detach().clone() for n, p in module.named_parameters()},
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }
    if kind == "plain":
        (tested,) = trainer.test(module, _loader(16), verbose=False)
        result["tested"] = tested
        result["predicted"] = torch.cat(trainer.predict(module, _loader(16)))
    if strategy is not None:
        result["owned"] = set(strategy.engine.named_parameters())
        strategy.engine.close()
    return result


@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec|logging interval|validation_step).*")
@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_an_ordinary_module_trains_as_on_one_device(
    kind: str, ranks: Callable[[int], Ranks]
) -> None:
    alone = fit(kind, pipelined=False)
    cut = ranks(2).run(fit, kind=kind, pipelined=True)
    for result in cut:
        assert result["parameters"].keys() == alone["parameters"].keys()
        for name, value in result["parameters"].items():
            assert torch.allclose(value, alone["parameters"][name], atol=1e-10, rtol=0), name
        for name, value in alone["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, abs=1e-10), name
        assert result["lr"] == alone["lr"]  # The scheduler's decision is everybody's.
        if kind == "plain":
            assert result["tested"]["test_loss"] == pytest.approx(alone["tested"]["test_loss"])
            assert torch.allclose(result["predicted"], alone["predicted"], atol=1e-10)
    assert cut[0]["owned"] | cut[1]["owned"] == alone["parameters"].keys()
    assert not cut[0]["owned"] & cut[1]["owned"]


def stop_early(folder: str) -> dict[str, Any]:
    strategy = PipelineStrategy(pp=2, dp=2, num_microbatches=2, timeout_s=60)
    stopping = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    keeping = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
    trainer = _trainer(
        strategy, callbacks=[stopping, keeping], max_epochs=20, enable_checkpointing=True
    )
    trainer.fit(Plain(), _loader(), _loader(32))
    result = {"epoch": trainer.current_epoch, "best": keeping.best_model_path}
    strategy.engine.close()
    return result


def test_early_stopping_and_best_checkpoints_decide_alike_on_all_ranks(
    ranks: Callable[[int], Ranks], tmp_path: Any
) -> None:
    results = ranks(4).run(stop_early, folder=str(tmp_path))
    assert {result["epoch"] for result in results} == {2}
    assert len({result["best"] for result in results}) == 1
    assert [path.name for path in tmp_path.iterdir()] == [results[0]["best"].rsplit("/", 1)[1]]


class Diverging(Plain):
    """Reads random numbers of its process: stages see different batches."""

    def train_dataloader(self) -> DataLoader:
        order = torch.Generator().manual_seed(os.getpid())
        x = torch.randn(32, 6, generator=order, dtype=torch.float64)
        return DataLoader(TensorDataset(x, x), batch_size=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_diverging(checked: bool = True) -> tuple[str, list[str]]:
    told: list[str] = []
    strategy = PipelineStrategy(pp=2, num_microbatches=2, timeout_s=60, check_batches=checked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_passes._log, "warning", told.append)
        try:
            _trainer(strategy).fit(Diverging())
        except Exception as error:
            return f"{type(error).__name__}: {error}", told
    return "no error", told


def test_different_batches_on_one_pipeline_are_an_error(ranks: Callable[[int], Ranks]) -> None:
    for message, _ in ranks(2).run(fit_diverging):
        assert message.startswith("DataError: the ranks of one pipeline see different batches")


def test_different_batches_that_nobody_compares_are_named_once(
    ranks: Callable[[int], Ranks],
) -> None:
    (first, told), second = ranks(2).run(fit_diverging, checked=False)
    assert (first, second) == ("no error", ("no error", []))
    (message,) = told
    assert message.startswith(
        "check_batches=False, and the ranks of one pipeline have different first batches: "
    )
    assert "Divide data of your own by trainer.distributed_sampler_kwargs (" in message


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(6))


@pytest.mark.lightning_feature(
    "callback", "StochasticWeightAveraging", note="with BatchNorm",
    refused="the callback StochasticWeightAveraging ends with an epoch of forwards alone that "
    "computes the running statistics of Normed's batch norms anew",
    fix="Use WeightAveraging, or a norm without running statistics (GroupNorm, LayerNorm).",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec|logging interval|validation_step).*")
def test_averages_that_train_batch_norms_again_are_refused(
    refusal: Callable[[object], None],
) -> None:
    trainer = _trainer(PipelineStrategy(pp=1), callbacks=[StochasticWeightAveraging(1e-2)])
    with pytest.raises(ModelError) as error:
        trainer.fit(Normed(), _loader())
    refusal(error.value)


@pytest.mark.lightning_feature(
    "flag", "devices", note="another number than pp times dp times tp",
    refused="pp=2 times dp=2 is 4 processes, but there are 3", fix="Try devices=4",
)  # fmt: skip
def test_a_world_that_the_degrees_do_not_fill_is_refused(
    refusal: Callable[[object], None],
) -> None:
    with pytest.raises(PlanError) as error:
        pl.Trainer(strategy=PipelineStrategy(pp=2, dp=2), devices=3, **QUIET)
    refusal(error.value)


def rerun_and_count() -> dict[str, Any]:
    """Nothing may pile up over steps."""
    strategy = PipelineStrategy(pp=2, num_microbatches=4, timeout_s=60)
    trainer = _trainer(strategy, max_epochs=2)
    module = Plain()
    trainer.fit(module, _loader(), _loader(16))
    engine = strategy.engine
    kept = (len(engine.mailbox._sent), len(engine.mailbox._previous), len(engine.mailbox._incoming))
    trainer.validate(module, _loader(16), verbose=False)
    engine.close()
    return {"kept": kept}


def test_no_message_is_left_after_training(ranks: Callable[[int], Ranks]) -> None:
    for result in ranks(2).run(rerun_and_count):
        assert result["kept"] == (0, 0, 0)


def fit_unseeded() -> dict[str, Any]:
    """Every process draws its own weights and buffers before training."""
    strategy = PipelineStrategy(pp=2, dp=2, num_microbatches=2, timeout_s=60)
    trainer = _trainer(strategy, max_epochs=1)
    module = Plain()
    torch.manual_seed(strategy.global_rank)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    module.register_buffer("offset", torch.randn(3))
    trainer.fit(module, _loader(), _loader(16))
    result = {
        "pp_rank": strategy.coordinates.pp_rank,
        "state": {n: v.detach().clone() for n, v in module.state_dict().items()},
    }
    strategy.engine.close()
    return result


def test_replicas_of_an_unseeded_module_start_and_stay_equal(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(4).run(fit_unseeded)
    for rank in (0, 1):
        one, other = (r["state"] for r in results if r["pp_rank"] == rank)
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def fit_lbfgs() -> str:
    class Second(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    strategy = PipelineStrategy(pp=2, num_microbatches=2, timeout_s=60)
    try:
        _trainer(strategy).fit(Second(), _loader(), _loader(16))
    except Exception as error:
        strategy.engine.close()
        return str(error)
    return "no error"


def test_lbfgs_on_several_ranks_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(2).run(fit_lbfgs):
        assert message.startswith("LBFGS decides on each rank")


def train_from_file(folder: str) -> tuple[int, str, int]:
    with contextlib.chdir(folder):
        strategy = PipelineStrategy(pp=2, schedule="custom", file="my.csv", timeout_s=60)
        trainer = _trainer(strategy, max_epochs=1, enable_checkpointing=False)
        trainer.fit(Plain(), _loader(), _loader())
    strategy.engine.close()
    assert strategy.plan.file is not None
    return strategy.plan.num_microbatches, strategy.plan.file.name, trainer.global_step


def test_a_script_of_ones_own_names_a_file(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    answers = ranks(2).run(train_from_file, folder=str(tmp_path))
    assert answers == [(2, "my.csv", len(_loader()))] * 2
