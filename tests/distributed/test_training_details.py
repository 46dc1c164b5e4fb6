"""What users' modules, samplers and callbacks do to a pipeline: equal to one device, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from strategies.ir.kinds import Kind
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
F, B = Kind.F, Kind.B


class Units(pl.LightningModule):
    """Eight linear units; subclasses change one thing each."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.units = nn.ModuleList([self.make() for _ in range(count)])

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [(f"units.{i}", unit) for i, unit in enumerate(self.units)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        loss = functional.mse_loss(tensors[0], batch[1])
        name = "train_loss" if mode == "train" else "val_loss"
        self.log(name, loss, batch_size=len(batch[0]), sync_dist=mode != "train")
        return loss

    def step(self, batch: Any, batch_idx: int, mode: str) -> Tensor:
        tensors = self.pipeline_inputs(batch)
        for unit in self.units:
            tensors = (unit(*tensors),)
        return self.pipeline_result(tensors, batch, batch_idx, mode)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, batch_idx, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, batch_idx, "validate")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


class Unused(nn.Module):
    """Holds a weight that no step uses: its gradient is None, and weight decay leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class WithUnused(Units):
    def make(self) -> nn.Module:
        return Unused()


class InPlace(Units):
    """Every unit changes its input in place first."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0].clone(),)


class Looking(Units):
    """Ties its ends, and looks at gradients before the optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.units[7][0].weight = self.units[0][0].weight

    def on_after_backward(self) -> None:
        assert all(p.grad is not None for p in self.parameters())


class Unfreezing(Callback):
    """Trains units 2 and 3 from the second epoch on only."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._set(module, False)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._set(module, trainer.current_epoch > 0)

    def _set(self, module: Any, value: bool) -> None:
        for index in (5, 6):  # On the last rank, behind others that train.
            for parameter in module.units[index].parameters():
                parameter.requires_grad_(value)


KINDS: dict[str, tuple[type[Units], list[type[Callback]]]] = {
    "unused": (WithUnused, []),
    "in-place": (InPlace, []),
    "tied-and-looked-at": (Looking, []),
    "unfreezing": (Units, [Unfreezing]),
}

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "precision": "64-true",
}


def _loader(batch: int, rows: int = 32, **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, 4, generator=generator, dtype=torch.float64).unbind()
    return DataLoader(TensorDataset(x, y), batch_size=batch, **options)


def fit(kind: str, layout: tuple[int, int] | None) -> dict[str, Any]:
    module_class, callbacks = KINDS[kind]
    module = module_class()
    pp, dp = layout or (1, 1)
    strategy = None
    extra: dict[str, Any] = {"devices": 1}
    if layout is not None:
        strategy = PipelineStrategy(
            pp=pp, dp=dp, schedule="gpipe", num_microbatches=3, timeout_s=60
        )
        extra = {"strategy": strategy}
    trainer = pl.Trainer(
        max_epochs=3,
        enable_checkpointing=False,
        callbacks=[made() for made in callbacks],
        **QUIET,
        **extra,
    )
    # 20 rows in batches of 8: the last one is short, and shares are uneven.
    trainer.fit(module, _loader(8 // dp), _loader(8 // dp, rows=20))
    result = {
        "parameters": {n: p.detach().clone() for n, p in module.named_parameters()},
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }
    if strategy is not None:
        strategy.engine.close()
    return result


@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec|logging interval).*")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [(2, 1), pytest.param((2, 2), marks=pytest.mark.full)])
def test_unusual_modules_train_as_on_one_device(
    kind: str, layout: tuple[int, int], ranks: Callable[[int], Ranks]
) -> None:
    alone = fit(kind, None)
    for result in ranks(layout[0] * layout[1]).run(fit, kind=kind, layout=layout):
        for name, value in result["parameters"].items():
            # A tied weight is known by its first name.
            known = alone["parameters"].get(name)
            known = alone["parameters"]["units.0.0.weight"] if known is None else known
            assert torch.allclose(value, known, atol=1e-10, rtol=0), name
        if layout == (2, 1):
            assert result["val_loss"] == pytest.approx(alone["val_loss"], abs=1e-12)


def fit_groups(group: int | None, rows: int) -> dict[str, Any]:
    """A group of its own and batches of new shapes: more than a send may be in flight.

    Without a group stock Lightning on one device.
    """
    options: dict[str, Any] = {"devices": 1}
    strategy = None
    if group is not None:
        strategy = PipelineStrategy(
            pp=2, schedule="interleaved_1f1b", num_microbatches=4, group=group, timeout_s=60
        )
        options = {"strategy": strategy}
    trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, **QUIET, **options)
    module = Units()
    trainer.fit(module, _loader(8, rows=rows), _loader(8))
    program: list[str] = []
    if strategy is not None:
        row = strategy.engine.programs.train.ranks[strategy.coordinates.pp_rank]
        program = [f"{i.microbatch}{i.kind.value}{i.stage}" for i in row if i.kind in (F, B)]
        strategy.engine.close()
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    return {"steps": trainer.global_step, "parameters": weights, "program": program,
            "val_loss": float(trainer.callback_metrics["val_loss"])}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec|logging interval).*")
@pytest.mark.parametrize("rows", [16, 19, 17])
def test_a_large_group_trains_as_one_device_with_new_shapes_and_short_batches(
    rows: int, ranks: Callable[[int], Ranks]
) -> None:
    alone = fit_groups(None, rows)
    for result in ranks(2).run(fit_groups, group=4, rows=rows):
        # Four microbatches of one stage in a row: with the default it were two.
        assert [word[0] for word in result["program"][:4]] == ["0", "1", "2", "3"]
        assert len({word[1:] for word in result["program"][:4]}) == 1
        assert result["steps"] == alone["steps"] == -(-rows // 8)
        assert result["val_loss"] == pytest.approx(alone["val_loss"], abs=1e-12)
        for name, value in result["parameters"].items():
            assert torch.allclose(value, alone["parameters"][name], atol=1e-10, rtol=0), name


def fit_epochs(folder: str, resume: bool) -> dict[str, Any]:
    """Stops at the end of an epoch, then goes on in the next one."""

    def trainer(epochs: int) -> tuple[pl.Trainer, PipelineStrategy]:
        strategy = PipelineStrategy(pp=2, num_microbatches=2, timeout_s=60)
        keep = ModelCheckpoint(folder, save_last=True, save_top_k=0) if resume else None
        made = pl.Trainer(
            max_epochs=epochs,
            strategy=strategy,
            enable_checkpointing=resume,
            callbacks=[keep] if keep else [],
            **QUIET,
        )
        return made, strategy

    module = Units()
    if resume:
        first, strategy = trainer(2)
        first.fit(module, _loader(8), _loader(8))
        strategy.engine.close()
        module = Units()
    last, strategy = trainer(4)
    last.fit(module, _loader(8), _loader(8), ckpt_path=f"{folder}/last.ckpt" if resume else None)
    strategy.engine.close()
    return {"steps": last.global_step, "parameters": dict(module.named_parameters())}


def test_a_run_resumed_at_the_end_of_an_epoch_misses_nothing(
    ranks: Callable[[int], Ranks], tmp_path: Any
) -> None:
    whole = ranks(2).run(fit_epochs, folder=str(tmp_path), resume=False)
    resumed = ranks(2).run(fit_epochs, folder=str(tmp_path), resume=True)
    for one, other in zip(whole, resumed, strict=True):
        assert one["steps"] == other["steps"] == 16
        for name, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][name]), name


def fit_two_models(pp: int) -> list[dict[str, Tensor]]:
    """The weights of two models that one Trainer trains, one after the other."""
    strategy = PipelineStrategy(pp=pp, num_microbatches=2, timeout_s=60) if pp > 1 else None
    options: dict[str, Any] = {"devices": 1} if strategy is None else {"strategy": strategy}
    trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, **QUIET, **options)
    trained = []
    for module in (Units(), Units(4)):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(module, _loader(8), _loader(8))
        trained.append({n: p.detach().clone() for n, p in module.named_parameters()})
    if strategy is not None:
        strategy.engine.close()
    return trained


@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec|logging interval).*")
def test_a_second_model_in_the_same_trainer_is_trained(ranks: Callable[[int], Ranks]) -> None:
    alone = fit_two_models(1)
    for trained in ranks(2).run(fit_two_models, pp=2):
        for weights, known in zip(trained, alone, strict=True):
            assert weights.keys() == known.keys()
            for name, value in weights.items():
                assert torch.allclose(value, known[name], atol=1e-10, rtol=0), name


def save_as_file(path: str, pp: int) -> None:
    strategy = PipelineStrategy(pp=pp, num_microbatches=2, checkpoints="file", timeout_s=60)
    options: dict[str, Any] = {"strategy": strategy} if pp > 1 else {"devices": 1}
    trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, **QUIET, **options)
    trainer.fit(Units(), _loader(8), _loader(8))
    trainer.save_checkpoint(path)
    if pp > 1:
        strategy.engine.close()


@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec|logging interval).*")
def test_the_file_of_a_module_with_units_is_the_one_that_stock_lightning_writes(
    ranks: Callable[[int], Ranks], tmp_path: Any
) -> None:
    save_as_file(str(tmp_path / "stock"), 1)
    ranks(2).run(save_as_file, path=str(tmp_path / "cut"), pp=2)
    stock, cut = (torch.load(tmp_path / name, weights_only=True) for name in ("stock", "cut"))
    assert list(cut["state_dict"]) == list(stock["state_dict"])
    (ours,), (theirs,) = cut["optimizer_states"], stock["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for place, entry in theirs["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(ours["state"][place][name], value)


def batches_seen(kind: str) -> list[list[float]] | str:
    strategy = PipelineStrategy(pp=1, dp=2, num_microbatches=2, timeout_s=60)
    trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, **QUIET, strategy=strategy)
    seen: list[list[float]] = []

    class Noting(Units):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch[0][:, 0].tolist())

    loader = _loader(4)
    if kind == "weighted":
        torch.manual_seed(3)
        weights = WeightedRandomSampler([1.0] * 32, 32, replacement=False)
        loader = DataLoader(loader.dataset, batch_size=4, sampler=weights)
    else:
        rows = torch.utils.data.BatchSampler(range(32), 4, drop_last=False)
        loader = DataLoader(loader.dataset, batch_sampler=rows)
    try:
        trainer.fit(Noting(), loader, _loader(4))
    except Exception as error:
        return str(error)
    strategy.engine.close()
    return seen


def test_a_sampler_of_the_users_own_is_dealt_out(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(batches_seen, kind="weighted")
    assert len(first) == len(second) == 4
    assert not {x for batch in first for x in batch} & {x for batch in second for x in batch}


def test_what_cannot_be_dealt_out_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(2).run(batches_seen, kind="batches"):
        assert "every replica would train on the same data" in message
