"""torchmetrics objects in steps and hooks: the numbers of stock Lightning on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torchmetrics as tm
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.distributed.foreign.comparison import CLASSES, EVERY_LAYOUT, Net, equal_to_stock
from tests.distributed.pool import Ranks

pytestmark = pytest.mark.distributed
KIND: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}


class Updated(Net):
    """torchmetrics_update_and_log."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = tm.Accuracy(**KIND)
        self.auroc = tm.AUROC(**KIND)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self(batch[0])
        self.acc.update(z, batch[1])
        self.auroc.update(z, batch[1])
        self.log("acc", self.acc)
        self.log("auroc", self.auroc)


class Called(Net):
    """metric_object_forward_and_log."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = tm.F1Score(average="macro", **KIND)
        self.train_f1 = tm.F1Score(average="macro", **KIND)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        self.train_f1(z, batch[1])
        self.log("train_f1", self.train_f1, on_step=True, on_epoch=True)
        return cross_entropy(z, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.f1(self(batch[0]), batch[1])
        self.log("f1", self.f1)


class Template(Net):
    """The pattern of lightning-hydra-template."""

    def __init__(self) -> None:
        super().__init__()
        self.train_acc = tm.Accuracy(**KIND)
        self.val_acc = tm.Accuracy(**KIND)
        self.train_loss = tm.MeanMetric()
        self.val_loss = tm.MeanMetric()
        self.best = tm.MaxMetric()

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.best.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        loss = cross_entropy(z, batch[1])
        self.train_loss(loss)
        self.train_acc(z.argmax(1), batch[1])
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self(batch[0])
        self.val_loss(cross_entropy(z, batch[1]))
        self.val_acc(z.argmax(1), batch[1])
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.best(self.val_acc.compute())
        self.log("val/best", self.best.compute(), sync_dist=True, prog_bar=True)


@EVERY_LAYOUT
@pytest.mark.parametrize("case", [Updated, Called, Template])
def test_a_metric_has_the_number_of_stock_lightning(
    case: Any, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, _ = equal_to_stock(ranks, case, layout, max_epochs=2, num_sanity_val_steps=2)
    assert stock.metrics
