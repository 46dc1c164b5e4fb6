"""What others have reported of pipelines elsewhere: here it is as under stock, or is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.test_trainer_flags import equal
from tests.distributed.test_trainer_flags import run as run_flags
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
WIDTH = 6
Layout = Mapping[str, Any] | None


def _stack(depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = _stack()
        self.told: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Halving:
    """A scheduler that is none of torch's: it steps the optimizer that it was made with."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self, epoch: int, metric: Any = None) -> None:
        self.steps += 1
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] *= 0.5 if number else 0.8

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class OwnScheduler(Net):
    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        optimizer = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.2)
        return [optimizer], [{"scheduler": Halving(optimizer), "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch, metric=metric)
        self.told.append([group["lr"] for group in scheduler.optimizer.param_groups])


class Pair(Net):
    """Two optimizers by hand, one of which steps twice per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.other = _stack(2)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        for _ in range(2):
            second.zero_grad()
            self.manual_backward(mse_loss(self.other(self.layers(batch[0]).detach()), batch[0]))
            second.step()
        first.zero_grad()
        self.manual_backward(mse_loss(self.other(self.layers(batch[0])), batch[0]))
        first.step()

    def configure_optimizers(self) -> Any:
        own, others = self.layers.parameters(), self.other.parameters()
        return torch.optim.Adam(own, lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)


class Summed(Net):
    """Notes the gradients that the optimizer gets."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.told.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])


CASES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "a scheduler that is none of torch's": (OwnScheduler, {"max_epochs": 3}),
    "two optimizers count steps": (Pair, {"max_epochs": 3, "max_steps": 18}),
    "gradients are divided once": (
        Summed, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "rows": 50, "size": 10}
    ),
}  # fmt: skip


def train(
    case: str, layout: Layout, folder: str, *, rows: int = 32, size: int = 8, **flags: Any
) -> dict[str, Any]:
    kind, options = CASES[case]
    options = options | flags
    rows, size = options.pop("rows", rows), options.pop("size", size)
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    module = kind()
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    strategy = None if layout is None else {"num_microbatches": 4, **layout}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of(strategy, callbacks=[keep], enable_checkpointing=True, **options)
        trainer.fit(module, DataLoader(TensorDataset(x), batch_size=size))
    if strategy is not None:
        trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return {
        "steps": trainer.global_step,
        "told": module.told,
        "files": sorted(path.name for path in Path(folder).glob("*")),
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
    }


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("a scheduler that is none of torch's", {"pp": 2}),
        ("two optimizers count steps", {"pp": 2}),
        ("gradients are divided once", {"pp": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_is_as_under_stock_lightning(
    ranks: Callable[[int], Ranks], tmp_path: Path, case: str, layout: dict[str, int]
) -> None:
    flags = {"max_epochs": 1} if "max_epochs" not in CASES[case][1] else {}
    stock, piped = str(tmp_path / "stock"), str(tmp_path / "pipeline")
    (wanted,) = ranks(1).run(train, case=case, layout=None, folder=stock, **flags)
    for found in ranks(layout["pp"]).run(train, case=case, layout=layout, folder=piped, **flags):
        different = [name for name in wanted if not equal(wanted[name], found[name])]
        assert not different, {name: (wanted[name], found[name]) for name in different}


class Stateful:
    """A loader that goes on where its state says."""

    def __init__(self) -> None:
        self.served, self.begin = 0, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        begin, self.begin = self.begin, 0
        for number in range(begin, len(self)):
            self.served = number + 1
            generator = torch.Generator().manual_seed(number)
            yield (torch.randn(8, WIDTH, generator=generator, dtype=torch.float64),)
        self.served = 0

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["served"]


class OneCycle(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.told.append(round(float(batch[0].sum()), 9))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=16)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def resumed(layout: Layout, folder: str) -> list[Any]:
    """A training, and one that goes on from its fifth step, in the midst of an epoch."""
    found: list[Any] = []
    for path in (None, f"{folder}/step=5.ckpt"):
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
        strategy = None if layout is None else {"num_microbatches": 4, **layout}
        module = OneCycle()
        trainer = trainer_of(
            strategy, callbacks=[keep] if path is None else [], enable_checkpointing=path is None,
            max_epochs=2,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, Stateful(), ckpt_path=path)
        if strategy is not None:
            trainer.strategy.engine.close()  # type: ignore[attr-defined]
        found += [module.told, {n: p.detach().clone() for n, p in module.named_parameters()}]
    return found


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 1, "dp": 2}], ids=str)
def test_a_loader_with_a_state_goes_on_in_the_midst_of_an_epoch(
    ranks: Callable[[int], Ranks], tmp_path: Path, layout: dict[str, int]
) -> None:
    (stock,) = ranks(1).run(resumed, layout=None, folder=str(tmp_path / "stock"))
    for found in ranks(2).run(resumed, layout=layout, folder=str(tmp_path / "pipeline")):
        assert equal(stock[:3], found[:3])  # Stock's own weights are rounded on the way.
        batches, weights, others, again = found
        assert others == batches[5:] and equal(weights, again)


class Root(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs().mul(x[:, :1] != 0).sqrt()


class NoGradient(Net):
    """The backward of the first layer gives NaN for the third batch; its loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Root(WIDTH, WIDTH), *_stack())


def anomaly(layout: Layout, detect: bool) -> tuple[str, int]:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[17, 0] = 0.0
    strategy = None if layout is None else {"num_microbatches": 4, **layout}
    trainer = trainer_of(strategy, max_epochs=1, detect_anomaly=detect)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, with the forward
            trainer.fit(NoGradient(), DataLoader(TensorDataset(x), batch_size=8))
    except Exception as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


@pytest.mark.lightning_feature("flag", "detect_anomaly")
def test_a_gradient_that_is_not_finite_is_named_with_its_function_or_its_weight(
    ranks: Callable[[int], Ranks],
) -> None:
    ((stock, steps),) = ranks(1).run(anomaly, layout=None, detect=True)
    assert stock.startswith("Function 'MulBackward0' returned nan values") and steps == 2
    for found, step in ranks(2).run(anomaly, layout={"pp": 2}, detect=True):
        assert found.startswith(stock) and step == 2
    for found, step in ranks(2).run(anomaly, layout={"pp": 2}, detect=False):
        assert re.search(r"layers\.0\.(weight|bias)", found) and step == 2


class Interrupted(Callback):
    """Ctrl-C on rank 0, as a notebook or a terminal of its own sends it."""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if os.environ["RANK"] == "0" and rest[-1] == 2:
            raise KeyboardInterrupt


def interrupted(folder: str) -> tuple[str, list[str]]:
    callbacks = [Interrupted(), OnExceptionCheckpoint(folder)]
    trainer = trainer_of(
        {"pp": 2, "num_microbatches": 4}, max_epochs=1, callbacks=callbacks,
        enable_checkpointing=True,
    )  # fmt: skip
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Net(), DataLoader(TensorDataset(x), batch_size=8))
    except (SystemExit, KeyboardInterrupt) as error:
        return type(error).__name__, sorted(path.name for path in Path(folder).glob("*"))
    return "", []


@pytest.mark.lightning_feature("callback", "OnExceptionCheckpoint")
def test_an_interrupt_of_one_rank_ends_all_though_a_callback_saves(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    first, second = ranks(2).run(interrupted, folder=str(tmp_path))
    assert first == second == ("SystemExit", [])


class Divided(Net):
    """Takes its part of the data by the numbers that Lightning gives samplers."""

    def train_dataloader(self) -> Any:
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        given = getattr(self.trainer, "distributed_sampler_kwargs", None)
        number, count = (given["rank"], given["num_replicas"]) if given else (0, 1)
        return DataLoader(TensorDataset(x[number::count]), batch_size=8 // count)


def divided(layout: Layout) -> dict[str, Tensor]:
    module = Divided()
    strategy = None if layout is None else {"num_microbatches": 2, **layout}
    trainer_of(strategy, max_epochs=1, use_distributed_sampler=False).fit(module)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.lightning_feature("flag", "use_distributed_sampler")
@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 1, "dp": 2}], ids=str)
def test_data_that_is_divided_by_lightnings_numbers_is_trained_on_once(
    ranks: Callable[[int], Ranks], layout: dict[str, int]
) -> None:
    (stock,) = ranks(1).run(divided, layout=None)
    assert all(equal(stock, found) for found in ranks(2).run(divided, layout=layout))


def test_limits_count_a_replicas_batches_and_predictions_those_of_all(
    ranks: Callable[[int], Ranks],
) -> None:
    """As docs/differences.md says."""
    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "limit_test_batches": 2}
    (stock,) = ranks(1).run(run_flags, strategy=None, limit_predict_batches=1, **limits)
    layout = {"pp": 1, "dp": 2, "num_microbatches": 2}
    for found in ranks(2).run(
        run_flags, strategy=layout, size=4, limit_predict_batches=2, **limits
    ):
        assert equal(stock["state"], found["state"])
        assert stock["tested"][0] == pytest.approx(found["tested"][0], abs=1e-10)
        assert equal(torch.cat(stock["predicted"]), torch.cat(found["predicted"]))


SCRIPT = """
import hydra, json, os, torch
import lightning.pytorch as pl
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from strategies import PipelineStrategy
from torch import nn

ConfigStore.instance().store("asked", {"lr": 0.1, "pp": 2})


class Net(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(6, 6), nn.Tanh())])

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layers(batch), batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@hydra.main(version_base="1.3", config_path=None, config_name="asked")
def main(cfg):
    pl.seed_everything(0)
    strategy = PipelineStrategy(pp=cfg.pp, num_microbatches=2) if cfg.pp else "auto"
    trainer = pl.Trainer(strategy=strategy, devices="auto" if cfg.pp else 1, accelerator="cpu",
        max_epochs=1, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False)
    rows = torch.randn(32, 6, dtype=torch.float64)
    trainer.fit(Net(cfg.lr), torch.utils.data.DataLoader(rows, batch_size=8))
    if trainer.is_global_zero:
        told = {"lr": cfg.lr, "loss": trainer.callback_metrics["loss"].item()}
        with open(HydraConfig.get().runtime.output_dir + "/told.json", "w") as file:
            json.dump(told, file)


if __name__ == "__main__":
    main()
"""


@pytest.mark.full
def test_a_script_of_ones_own_sweeps_with_hydra(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = {}
    for pp in (0, 2):
        words = ["-m", "lr=0.1,0.01", f"pp={pp}", f"hydra.sweep.dir={tmp_path}/out{pp}"]
        done = subprocess.run(
            [sys.executable, "train.py", *words],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        files = sorted(tmp_path.glob(f"out{pp}/*/told.json"))
        found[pp] = [json.loads(path.read_text()) for path in files]
        assert len(list(tmp_path.glob(f"out{pp}/*/.hydra"))) == 2
    assert [job["lr"] for job in found[2]] == [job["lr"] for job in found[0]] == [0.1, 0.01]
    for one, other in zip(found[0], found[2], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-10)


class Counts(Callback):
    """Looks at no weight, and does not say so."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches = getattr(self, "batches", 0) + 1


class CountsAndSaysSo(Counts):
    reads_weights = False


def counted(kind: str, schedule: str) -> dict[str, Tensor]:
    callback = {"counts": Counts, "says so": CountsAndSaysSo}[kind]()
    strategy = {"pp": 2, "tp": 2, "schedule": schedule, "num_microbatches": 4}
    trainer = trainer_of(strategy, max_epochs=1, callbacks=[callback])
    x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer.fit(Net(), DataLoader(TensorDataset(x), batch_size=8))
    assert callback.batches == 6
    weights: dict[str, Tensor] = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return weights


@pytest.mark.full
def test_a_callback_that_looks_at_nothing_drains_no_schedule_under_tp(
    ranks: Callable[[int], Ranks],
) -> None:
    found, *_ = ranks(4).run(counted, kind="counts", schedule="pipedream_2bw")
    late, *_ = ranks(4).run(counted, kind="says so", schedule="pipedream_2bw")
    flushed, *_ = ranks(4).run(counted, kind="counts", schedule="1f1b")
    assert equal(late, found)
    assert not equal(late, flushed)
