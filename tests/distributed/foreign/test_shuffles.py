"""The order in which a training loader gives its rows: stock Lightning's, and gone on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks.fit import fit, trainer_of
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
ROWS = 8


class Noting(pl.LightningModule):
    """Notes which rows it gets; ``draws``: between its steps something else is drawn."""

    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.seen: list[int] = []
        self.draws = draws

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch[0]).mean())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += batch[-1].tolist()
        if self.draws:
            torch.rand(3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Two(Noting):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["a"], 0) + super().training_step(batch["b"], 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += [*batch["a"][-1].tolist(), *batch["b"][-1].tolist()]


# Every day: in the first and in the second epoch.
RESUMED = {("own generator", "1"), ("shuffled", "5")}


class Saving(pl.Callback):
    """Writes a checkpoint behind a step, or behind the first epoch."""

    def __init__(self, path: str, when: str) -> None:
        self.path, self.when = path, when

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if str(trainer.global_step) == self.when:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.when == "epoch" and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def _loader(kind: str) -> Any:
    data = TensorDataset(torch.ones(ROWS, 4), torch.arange(ROWS))
    own = torch.Generator().manual_seed(1)
    if kind == "two loaders":
        return {"a": _loader("shuffled"), "b": _loader("own generator")}
    options: dict[str, dict[str, Any]] = {
        "shuffled": {"shuffle": True},
        "workers": {"shuffle": True, "num_workers": 1},
        "own generator": {"shuffle": True, "generator": own},
        "own generator in the sampler": {"sampler": RandomSampler(data, generator=own)},
        "some": {"sampler": RandomSampler(data, num_samples=6)},
        "some twice": {"sampler": RandomSampler(data, replacement=True, num_samples=12)},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * ROWS, ROWS)},
        "weighted by a generator": {"sampler": WeightedRandomSampler([1.0] * 8, 8, generator=own)},
        "a subset": {"sampler": SubsetRandomSampler([0, 2, 4, 6])},
        "batches": {"batch_sampler": BatchSampler(RandomSampler(data), 2, drop_last=False)},
    }
    size = {} if kind == "batches" else {"batch_size": 2}
    return DataLoader(data, **size, **options[kind])


def order(
    kind: str,
    strategy: dict[str, Any] | None,
    *,
    epochs: int = 3,
    unlike: bool = False,
    resume: str | None = None,
    save: tuple[str, str] | None = None,
) -> list[int]:
    """Which rows a training gets, one after the other; runs on a rank of the tests.

    ``save``: a path, and when a checkpoint is written there.
    """
    pl.seed_everything(5, verbose=False)
    module = (Two if kind == "two loaders" else Noting)(draws=kind == "shuffled")
    if strategy is not None:
        strategy = {"num_microbatches": 2, **strategy}
    it = trainer_of(strategy, max_epochs=epochs, precision="32-true")
    if unlike and it.global_rank:

        class Drawing(pl.Callback):
            def on_train_epoch_end(self, *_: Any) -> None:
                torch.rand(1)

        it.callbacks.append(Drawing())
    if save is not None:
        it.callbacks.append(Saving(*save))
    data = TensorDataset(torch.ones(ROWS, 4), torch.arange(ROWS))
    it.fit(module, _loader(kind), DataLoader(data, batch_size=4), ckpt_path=resume)
    if isinstance(it.strategy, PipelineStrategy):
        it.strategy.engine.close()
    return module.seen


PIPELINE = {"pp": 2, "schedule": "1f1b"}
SELDOM = (
    "own generator in the sampler", "some", "some twice", "weighted by a generator", "a subset",
    "batches",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        "shuffled", "workers", "own generator", "weighted", "two loaders",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in SELDOM),
    ],
)  # fmt: skip
def test_a_pipeline_gets_the_rows_of_stock_lightning_in_its_order(
    ranks: Callable[[int], Ranks], kind: str
) -> None:
    (stock,) = ranks(1).run(order, kind=kind, strategy=None)
    assert len(stock) > ROWS
    assert ranks(2).run(order, kind=kind, strategy=PIPELINE) == [stock, stock]


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        pytest.param(kind, when, marks=() if (kind, when) in RESUMED else pytest.mark.full)
        for kind in ("shuffled", "own generator", "workers", "some", "two loaders")
        for when in ("epoch", "1", "5")
    ],
)
def test_a_resumed_run_goes_on_with_it(
    ranks: Callable[[int], Ranks], kind: str, when: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    whole = ranks(2).run(order, kind=kind, strategy=PIPELINE, save=(saved, when))
    rest = ranks(2).run(order, kind=kind, strategy=PIPELINE, resume=saved)
    rows = 4 if kind == "two loaders" else 2
    steps = (3 if kind == "some" else 4) if when == "epoch" else int(when)
    assert rest == [seen[rows * steps :] for seen in whole]


class Drawing(Noting):
    """Noise of its own, in the order in which the generator gives it."""

    def __init__(self) -> None:
        super().__init__(draws=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.rand_like(batch[0])
        self.noise = float(noise.sum())
        return super().training_step([batch[0] + noise, batch[1]], batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.heard = [*getattr(self, "heard", []), self.noise]


def noise(save: tuple[str, str] | None = None, resume: str | None = None) -> list[float]:
    pl.seed_everything(5, verbose=False)
    module = Drawing()
    data = TensorDataset(torch.ones(ROWS, 4), torch.arange(ROWS))
    with fit(
        module,
        DataLoader(data, batch_size=2),
        strategy={"num_microbatches": 2, **PIPELINE},
        resume=resume,
        callbacks=[] if save is None else [Saving(*save)],
        max_epochs=3,
        precision="32-true",
    ):
        return module.heard


@pytest.mark.full
@pytest.mark.parametrize(("when", "steps"), [("epoch", 4), ("4", 4), ("5", 5)])
def test_a_resumed_run_goes_on_with_the_noise_of_its_steps(
    ranks: Callable[[int], Ranks], when: str, steps: int, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    whole = ranks(2).run(noise, save=(saved, when))
    assert ranks(2).run(noise, resume=saved) == [heard[steps:] for heard in whole]


def test_ranks_whose_generators_differ_agree_on_another_order(
    ranks: Callable[[int], Ranks],
) -> None:
    first, second = ranks(2).run(order, kind="shuffled", strategy=PIPELINE, unlike=True)
    assert first == second
    for epoch in range(3):
        assert sorted(first[ROWS * epoch : ROWS * (epoch + 1)]) == list(range(ROWS))


@pytest.mark.parametrize(("kind", "count"), [("some", 6), ("some twice", 12)])
def test_replicas_share_what_a_sampler_draws(
    ranks: Callable[[int], Ranks], kind: str, count: int
) -> None:
    strategy = {"pp": 1, "dp": 2}
    first, second = ranks(2).run(order, kind=kind, strategy=strategy, epochs=1)
    assert len(first) == len(second) == count // 2
    if kind == "some":
        assert len({*first, *second}) == count
