"""Replicas that log other names for other numbers of batches: values are joined by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from strategies.errors import ModelError
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks.comparison import WIDTH, Net
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class _Some(IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self._count)
        for _ in range(self._count):
            yield torch.randn(8, WIDTH, generator=generator)


class _Logs(Net):
    """Of two validation loaders, replica 1 has one batch of the first and none of the second."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.rare, self.mean = MeanMetric(), MeanMetric()
        self.seen: dict[str, float] = {}

    def replica(self) -> int:
        return int(self.trainer.distributed_sampler_kwargs["rank"])  # type: ignore[attr-defined]

    def load(self, *counts: int) -> DataLoader[Any]:
        data: Dataset[Any] = _Some(counts[self.replica()])
        return DataLoader(data, batch_size=None)

    def train_dataloader(self) -> Any:
        return self.load(2, 2)

    def val_dataloader(self) -> Any:
        return [self.load(3, 1), self.load(2, 0)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        zero = 0 * self(batch).square().mean()
        replica = self.replica()
        values = {"cat": 1.0 + replica, "dog": 10.0, "bird": 100.0}
        for name in ("dog", "cat") if replica else ("cat", "bird"):
            self.log(name, values[name] + zero)
        self.log("most", zero + replica + batch_idx, reduce_fx="max", sync_dist=True)
        self.mean.update(torch.tensor(1.0 + replica))
        self.log("mean", self.mean)
        if replica == 0:
            self.rare.update(torch.tensor(5.0))
            self.log("rare", self.rare)
        if self.kind == "options":
            self.log("both", zero, reduce_fx="sum" if replica else "mean")
        if self.kind == "object":
            self.log("both", self.mean if replica else zero)

    def on_validation_epoch_end(self) -> None:
        self.seen = {name: float(v) for name, v in self.trainer.callback_metrics.items()}


def _fit(kind: str) -> tuple[list[Any], dict[str, float]]:
    strategy = PipelineStrategy(pp=2, dp=2, num_microbatches=4)
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=2 if kind else 0,
    )  # fmt: skip
    module = _Logs(kind)
    trainer.fit(module)
    seen = module.seen
    found = trainer.validate(module, verbose=False)
    return [{name: float(v) for name, v in each.items()} for each in found], seen


def test_an_epochs_values_are_joined_by_name(ranks: Callable[[int], Ranks]) -> None:
    loaders = [
        {"cat": 5 / 4, "bird": 100.0, "dog": 10.0, "most": 2.0},  # cats: three 1 and one 2
        {"cat": 1.0, "bird": 100.0, "most": 1.0},
    ]
    means = {"mean": 7 / 6, "rare": 5.0}  # five 1 and one 2: the object has seen both loaders
    right = [
        {f"{name}/dataloader_idx_{n}": value for name, value in (found | means).items()}
        for n, found in enumerate(loaders)
    ]
    for found, seen in ranks(4).run(_fit, kind=""):
        for got, expected in zip(found, right, strict=True):
            assert got == pytest.approx(expected, rel=1e-6)
        assert seen == pytest.approx(right[0] | right[1], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("options", r"self.log\('both'\).*reduce_fx is mean on replica 0 and sum on replica 1"),
        pytest.param(
            "object",
            r"self.log\('both'\).*object is None on replica 0 and mean on replica 1",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_name_that_is_logged_in_two_ways_is_refused(
    ranks: Callable[[int], Ranks], kind: str, words: str
) -> None:
    for error in ranks(4).refusals(_fit, kind=kind):
        assert isinstance(error, ModelError)
        assert re.search(words, str(error))
