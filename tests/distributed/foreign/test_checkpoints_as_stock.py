"""Out of a pipeline and back by the lines of Lightning's documentation: files, and folders."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from omegaconf import OmegaConf
from torch import Tensor, nn

from strategies import PipelineStrategy
from strategies.errors import CheckpointError, ModelError
from strategies.runtime.lightning.checkpoints.stock_file import load_checkpoint
from tests.ranks.comparison import (
    EVERY_LAYOUT,
    LAYOUTS,
    MICROBATCHES,
    WIDTH,
    Net,
    examples,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False, "enable_checkpointing": False, "precision": "64-true",
}  # fmt: skip


class Named(Net):
    """Hyper-parameters, and groups in an order that is not that of the layers."""

    def __init__(self, rate: float, sizes: tuple[int, ...] = (3,), shape: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.double()  # stock Lightning rounds what it loads to the module's own type
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.head.parameters(), *self.net[2].parameters()], "lr": 0.3},
            {"params": [p for i in (6, 0, 4) for p in self.net[i].parameters() if p.ndim > 1]},
            {"params": [p for i in (6, 0, 4) for p in self.net[i].parameters() if p.ndim == 1]},
        ]
        optimizer = torch.optim.Adam(groups, lr=self.hparams.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class Losses(Callback):
    """Every step's loss; it saves behind one of them, as a script would."""

    reads_weights = False

    def __init__(self, save: str | None = None, at: int = 3) -> None:
        self.save, self.at = save, at
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        if self.save is not None and trainer.global_step == self.at:
            trainer.save_checkpoint(self.save)


def strategy_of(layout: str | None, **more: Any) -> dict[str, Any]:
    if layout is None:
        return {"devices": 1}
    options = {"num_microbatches": MICROBATCHES, "timeout_s": 60, **LAYOUTS[layout], **more}
    return {"strategy": PipelineStrategy(**options)}


def run(
    layout: str | None,
    *,
    save: str | None = None,
    at: int = 3,
    resume: str | None = None,
    replicas: int = 1,
    strategy: dict[str, Any] | None = None,
    rows: int = 32,
) -> dict[str, Any]:
    """Trains two epochs of four steps, or what is left of them."""
    module, losses = Named(0.01), Losses(save, at)
    trainer = pl.Trainer(
        **QUIET, max_epochs=2, callbacks=[losses], **strategy_of(layout, **(strategy or {}))
    )
    trainer.fit(module, examples(rows=rows, replicas=replicas), ckpt_path=resume)
    (metrics,) = trainer.validate(module, examples(seed=2, replicas=replicas), verbose=False)
    if isinstance(trainer.strategy, PipelineStrategy):
        trainer.strategy.engine.close()
    return {
        "losses": losses.losses, "metrics": metrics, "rates": _rates(trainer),
        "state": {name: value.clone() for name, value in module.state_dict().items()},
    }  # fmt: skip


def _rates(trainer: pl.Trainer) -> list[float]:
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


def assert_same(found: dict[str, Any], wanted: dict[str, Any], *, steps: int = 8) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"][-steps:], abs=1e-10)
    assert found["metrics"] == pytest.approx(wanted["metrics"], abs=1e-10)
    assert found["rates"] == pytest.approx(wanted["rates"])
    assert list(found["state"]) == list(wanted["state"])
    for name, value in wanted["state"].items():
        assert torch.allclose(found["state"][name], value, atol=1e-10), name


@EVERY_LAYOUT
@pytest.mark.lightning_feature("callback", "ModelCheckpoint", "Checkpoint")
def test_stock_and_pipeline_continue_each_others_files(
    layout: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    replicas = LAYOUTS[layout].get("dp", 1)
    world = ranks(2 * replicas)
    stock_file, own_file = str(tmp_path / "stock.ckpt"), str(tmp_path / "own.ckpt")
    data = {"rows": 32 * replicas}
    (stock,) = ranks(1).run(run, layout=None, save=stock_file, at=4, replicas=replicas, **data)
    for whole in world.run(run, layout=layout, save=own_file, at=4, **data):
        assert_same(whole, stock)
    for continued in world.run(run, layout=layout, resume=stock_file, **data):
        assert_same(continued, stock, steps=4)
    (back,) = ranks(1).run(run, layout=None, resume=own_file, replicas=replicas, **data)
    assert_same(back, stock, steps=4)
    theirs, ours = (torch.load(path, weights_only=True) for path in (stock_file, own_file))
    assert ours.keys() - theirs.keys() == {"foldpipe"}
    assert theirs.keys() <= ours.keys()
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    (own,), (its,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert own["param_groups"] == its["param_groups"]
    assert own["state"].keys() == its["state"].keys()
    for position, entry in its["state"].items():
        for key, value in entry.items():
            assert torch.allclose(own["state"][position][key], value, atol=1e-10), (position, key)


@pytest.mark.parametrize("kind", ["file", pytest.param("folder", marks=pytest.mark.full)])
def test_a_run_that_was_saved_inside_an_epoch_goes_on_at_another_layout(
    kind: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = str(tmp_path / "inside.ckpt")
    first, _ = ranks(2).run(run, layout="1f1b", save=path, strategy={"checkpoints": kind})
    assert os.path.isdir(path) == (kind == "folder")
    for continued in ranks(2).run(run, layout="zb_v", resume=path):
        assert_same(continued, first, steps=5)


@pytest.mark.full
def test_an_optimizer_that_is_spread_over_replicas_comes_together_in_a_file(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path, plain = str(tmp_path / "zero1.ckpt"), {"overlap": "grad_reduce"}
    options: dict[str, Any] = {"layout": "1f1b-dp2", "rows": 64}
    first, *_ = ranks(4).run(run, save=path, strategy={"overlap": "zero1"}, **options)
    for continued in ranks(4).run(run, resume=path, strategy=plain, **options):
        assert_same(continued, first, steps=5)


class Partly(Named):
    """Its checkpoints leave out weights of two stages, as one with a frozen encoder does."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in ("net.0.weight", "head.bias"):
            state.pop(name)
        checkpoint["doubled"] = {name: value * 2 for name, value in state.items()}
        checkpoint["norm"] = sum(float(p.detach().norm()) for p in self.parameters())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        missing = {n: torch.ones_like(v) for n, v in self.state_dict().items() if n not in state}
        state.update(missing)


def save_partly(layout: str | None, path: str, after: str, kind: str = "auto") -> dict[str, Any]:
    more = {} if layout is None else {"checkpoints": kind}
    trainer = pl.Trainer(
        **QUIET, max_epochs=1, callbacks=[Losses(path, at=4)], **strategy_of(layout, **more)
    )
    module = Partly(0.01)
    trainer.fit(module, examples())
    trainer.save_checkpoint(after)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, examples(), ckpt_path=path)
    end = {name: value.clone() for name, value in module.state_dict().items()}
    if isinstance(trainer.strategy, PipelineStrategy):
        trainer.strategy.engine.close()
    written = [load_checkpoint(place) for place in (path, after)]
    keys = ("state_dict", "doubled", "norm")
    return {"end": end, "written": [{key: one[key] for key in keys} for one in written]}


def places(folder: Path) -> dict[str, str]:
    return {"path": str(folder / "first.ckpt"), "after": str(folder / "second.ckpt")}


@pytest.fixture(scope="module")
def stock_partly(
    ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What stock Lightning writes and ends with; the same for every layout."""
    folder = tmp_path_factory.mktemp("stock")
    found: list[dict[str, Any]] = ranks(1).run(save_partly, layout=None, **places(folder))
    return found[0]


@pytest.mark.parametrize(("layout", "kind"), [("1f1b", "auto"), ("zb_v", "folder")])
def test_hooks_find_the_whole_state_in_checkpoints(
    layout: str,
    kind: str,
    stock_partly: dict[str, Any],
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
) -> None:
    for found in ranks(2).run(save_partly, layout=layout, kind=kind, **places(tmp_path)):
        for one, other in zip(found["written"], stock_partly["written"], strict=True):
            assert one["norm"] == pytest.approx(other["norm"])
            for key in ("state_dict", "doubled"):
                assert sorted(one[key]) == sorted(other[key])
                for name, value in other[key].items():
                    assert torch.allclose(one[key][name], value, atol=1e-10), name
        for name, value in stock_partly["end"].items():
            assert torch.allclose(found["end"][name], value, atol=1e-10), name


def average(
    layout: str | None, save: str | None = None, resume: str | None = None, kind: str = "auto"
) -> tuple[dict[str, Tensor], str]:
    module, said = Named(0.01), ""
    more = {} if layout is None else {"checkpoints": kind}
    callbacks = [EMAWeightAveraging(decay=0.8), Losses(save, at=4)]
    trainer = pl.Trainer(**QUIET, max_epochs=2, callbacks=callbacks, **strategy_of(layout, **more))
    try:
        trainer.fit(module, examples(), ckpt_path=resume)
    except ModelError as error:
        said = str(error)
    if isinstance(trainer.strategy, PipelineStrategy):
        trainer.strategy.engine.close()
    return {} if said else {n: v.clone() for n, v in module.state_dict().items()}, said


def test_averages_of_weights_go_on_from_a_file(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path, folder = str(tmp_path / "averages.ckpt"), str(tmp_path / "folder.ckpt")
    (wanted, _), _ = ranks(2).run(average, layout="1f1b", save=path)
    written = torch.load(path, weights_only=True)
    assert list(written["current_model_state"]) == list(written["state_dict"]) == list(wanted)
    continued = ranks(2).run(average, layout="zb_v", resume=path)
    for found, _ in [*continued, *ranks(1).run(average, layout=None, resume=path)]:
        for name, value in wanted.items():
            assert torch.allclose(found[name], value, atol=1e-10), name
    ranks(2).run(average, layout="1f1b", save=folder, kind="folder")
    for _, said in ranks(2).run(average, layout="1f1b", resume=folder):
        assert "a folder with the averages of WeightAveraging" in said


def use_checkpoints(folder: str, kind: str) -> dict[str, Any]:
    """The lines of Lightning's documentation around ``ModelCheckpoint``."""
    keep = ModelCheckpoint(folder, monitor="val", save_top_k=2, save_last=True, every_n_epochs=1)
    shape = OmegaConf.create({"width": {"inner": [8, 3]}, "twice": "${.width.inner}"})
    model = Named(0.01, sizes=(3, 4), shape=shape)
    options = QUIET | {"enable_checkpointing": True}
    trainer = pl.Trainer(
        **options, max_epochs=3, callbacks=[keep], **strategy_of("1f1b", checkpoints=kind)
    )
    trainer.fit(model, examples(), examples(seed=2))
    (best,) = trainer.test(dataloaders=examples(seed=2), ckpt_path="best", verbose=False)
    (last,) = trainer.test(dataloaders=examples(seed=2), ckpt_path="last", verbose=False)
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    loaded = Named.load_from_checkpoint(keep.best_model_path)
    other = Named.load_from_checkpoint(keep.best_model_path, rate=0.5)
    trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return {
        "tested": (best["val"], float(keep.best_model_score), last["val"]),
        "best": keep.best_model_path,
        "hparams": [dict(loaded.hparams), dict(other.hparams)],
        "written": OmegaConf.to_yaml(loaded.hparams["shape"]),
        "state": {name: value.clone() for name, value in loaded.state_dict().items()},
        "there": sorted(os.listdir(folder)),
        "end": {name: value.clone() for name, value in model.state_dict().items()},
    }


@pytest.mark.parametrize("kind", ["auto", pytest.param("folder", marks=pytest.mark.full)])
def test_the_documented_lines_work(
    kind: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    first, second = ranks(2).run(use_checkpoints, folder=str(tmp_path), kind=kind)
    assert first["tested"] == second["tested"]
    best, score, _ = first["tested"]
    assert best == pytest.approx(score)
    names = ["end.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt", "weights.ckpt"]
    assert first["there"] == names
    assert first["hparams"] == [
        {"rate": rate, "sizes": (3, 4), "shape": {"width": {"inner": [8, 3]}, "twice": [8, 3]}}
        for rate in (0.01, 0.5)
    ]
    assert "twice: ${.width.inner}" in first["written"]
    assert all((tmp_path / name).is_file() == (kind == "auto") for name in first["there"])
    found = load_checkpoint(first["best"])
    for name, value in found["state_dict"].items():
        assert torch.equal(first["state"][name], value)
    for name in ("end.ckpt", "weights.ckpt"):
        saved = load_checkpoint(tmp_path / name)
        for key, value in saved["state_dict"].items():
            assert torch.equal(first["end"][key], value)
    if kind == "auto":
        assert "optimizer_states" in torch.load(tmp_path / "end.ckpt", weights_only=True)
        assert "optimizer_states" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


class Around(Net):
    """A module that was given another one, as lightning-hydra-template's are."""

    def __init__(self, activation: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the module is in the state as well
            self.save_hyperparameters()
        self.net[1] = activation


def save_objects(path: str) -> list[str]:
    module = Around(nn.ReLU())
    trainer = pl.Trainer(**QUIET, max_epochs=1, **strategy_of("1f1b"))
    trainer.fit(module, examples())
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, examples(), ckpt_path=path)
    with pytest.warns(UserWarning, match="hyper-parameters as text alone: activation=ReLU"):
        loaded = Around.load_from_checkpoint(path, activation=nn.ReLU())
    trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return list(loaded.state_dict())


def test_hyper_parameters_that_are_objects_are_named(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = tmp_path / "objects.ckpt"
    for names in ranks(2).run(save_objects, path=str(path)):
        assert names == list(Net().state_dict())
    assert path.is_dir()


def refused(path: str) -> str:
    module = Named(0.01)
    trainer = pl.Trainer(**QUIET, max_epochs=2, **strategy_of("1f1b"))
    with pytest.raises(CheckpointError) as error:
        trainer.fit(module, examples(), ckpt_path=path)
    trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return str(error.value)


class Other(Named):
    """With a layer more."""

    def __init__(self) -> None:
        super().__init__(0.01)
        self.more = nn.Linear(2, 2)


def test_a_file_that_cannot_serve_is_refused_on_all_ranks_alike(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    states = {
        "weights": Net().state_dict(),
        "objects": {"state_dict": {}, "hyper_parameters": {"make": functools.partial(max, 1)}},
        "other": {"state_dict": Other().state_dict(), "pytorch-lightning_version": "2.6.0"},
    }
    said = {}
    for name, state in states.items():
        torch.save(state, tmp_path / f"{name}.ckpt")
        first, second = ranks(2).run(refused, path=str(tmp_path / f"{name}.ckpt"))
        assert first == second
        said[name] = first
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "other.ckpt").read_bytes()[:900])
    said["cut"] = ranks(2).run(refused, path=str(tmp_path / "cut.ckpt"))[0]
    assert "has no state_dict" in said["weights"]
    assert "holds an object of functools.partial" in said["objects"]
    assert "has, and this one lacks, 2 names: more.weight, more.bias" in said["other"]
    assert "cannot be read as a checkpoint of Lightning" in said["cut"]


class FromConfig(Net):
    """Given one container of omegaconf: with a value that is missing, or one from outside of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)


def use_config(path: str, kind: str) -> list[Any]:
    net = {"rate": "${..rate}", "twice": "${.rate}"}
    outer = OmegaConf.create({"rate": 0.1, "net": net, "data": {"name": "???"}})
    found: list[Any] = []
    for config in (outer, outer.net):
        module = FromConfig(config)
        trainer = pl.Trainer(**QUIET, max_epochs=1, **strategy_of("1f1b", checkpoints=kind))
        trainer.fit(module, examples())
        trainer.save_checkpoint(path)
        loaded = FromConfig.load_from_checkpoint(path, config=config)
        found += [type(loaded.hparams).__name__, OmegaConf.to_yaml(loaded.hparams)]
        trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("kind", ["auto", pytest.param("folder", marks=pytest.mark.full)])
def test_containers_of_omegaconf_are_that_when_they_are_loaded(
    kind: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for found in ranks(2).run(use_config, path=str(tmp_path / "config.ckpt"), kind=kind):
        assert found == [
            "DictConfig",
            "rate: 0.1\nnet:\n  rate: ${..rate}\n  twice: ${.rate}\ndata:\n  name: ???\n",
            "DictConfig",
            "rate: ${..rate}\ntwice: ${.rate}\n",  # Lightning keeps a copy without what is around.
        ]


class Given(Around):
    """Its network is a hyper-parameter, too."""

    def __init__(self, net: nn.Module, width: int = WIDTH) -> None:
        super().__init__(nn.ReLU(), width)
        self.net = net


def save_network(kind: str) -> str:
    module = Given(Net().net)
    trainer = pl.Trainer(**QUIET, max_epochs=1, **strategy_of("1f1b", checkpoints=kind))
    try:
        trainer.fit(module, examples())
    except ModelError as error:
        return str(error)
    return f"{trainer.global_step} steps"


def test_a_file_with_layers_of_other_ranks_in_it_is_refused_before_the_first_step(
    ranks: Callable[[int], Ranks],
) -> None:
    for said in ranks(2).run(save_network, kind="file"):
        assert said == (
            "PipelineStrategy(checkpoints='file') writes the hyper-parameters, and net holds layers"
            " of Given, of which each rank has a part. Use self.save_hyperparameters(ignore="
            "['net']) and load_from_checkpoint(path, net=...), or checkpoints='folder', which notes"
            " their class alone."
        )
    assert ranks(2).run(save_network, kind="folder") == ["4 steps", "4 steps"]
