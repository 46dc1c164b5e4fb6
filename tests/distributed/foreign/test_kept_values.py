"""What steps keep of their layers' values, decide for the trainer and write: once per batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.functional import cross_entropy

from strategies.errors import ModelError
from tests.ranks.comparison import (
    LAYOUTS,
    TOLERANCE,
    Net,
    equal_to_stock,
    spread,
    train,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Logits(Net):
    """Keeps what its last layer gives, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []
        self.labels: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logits.append(self(batch[0]))
        self.labels.append(batch[1])

    def on_validation_epoch_end(self) -> None:
        right = torch.cat(self.logits).argmax(1) == torch.cat(self.labels)
        self.log("right", right.double().mean(), sync_dist=True)
        self.log("spread", torch.cat(self.logits).std(), sync_dist=True)
        self.logits.clear()
        self.labels.clear()


class ByKind(Net):
    """The same in dicts of lists, with what a layer in the middle gives."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[Tensor]] = defaultdict(list)
        self.last: Tensor | None = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        early = self.net[:2](batch[0])
        self.kept["early"].append(early)
        hidden = self.net[2:](early)
        self.kept["hidden"].append(hidden)
        self.last = self.head(hidden)

    def on_validation_epoch_end(self) -> None:
        assert self.last is not None
        self.log("last", self.last.std(), sync_dist=True)
        values = {name: torch.cat(kept).std() for name, kept in self.kept.items()}
        self.log_dict(values, sync_dist=True)
        self.kept.clear()


class Hidden(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        early = self.net[:2](batch[0])
        hidden = self.net[2:](early)
        self.kept += [early, hidden]
        return cross_entropy(self.head(hidden), batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("kept", torch.cat(self.kept).std(), sync_dist=True)
        self.kept.clear()


@pytest.mark.parametrize("layout", ["1f1b", pytest.param("zb_v", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", [Logits, ByKind, Hidden])
def test_values_that_are_kept_are_those_of_the_whole_batch(
    case: Any, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2)


class Stopping(Net):
    """Ends the training by what a step finds, or by how far it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        if self.global_step >= 2 and float(loss.detach()) < 100.0:
            self.trainer.should_stop = True
        return loss


class StoppingEarly(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step >= 1:
            self.trainer.should_stop = True
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        return loss


def steps(module: Any, trainer: Any) -> int:
    return int(trainer.global_step)


@spread([StoppingEarly, Stopping])
def test_a_step_may_end_the_training_on_all_ranks(
    case: Any, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, piped = equal_to_stock(ranks, case, layout, told=steps, max_epochs=3)
    assert [fitted.told for fitted in piped] == [stock.told] * len(piped)
    assert stock.told < 12


class Writing(Net):
    """Writes to the logger inside a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(self.logger, CSVLogger)
        self.logger.log_metrics({"loss": float(loss.detach())}, self.global_step)
        return loss


class Behind(Writing):
    """The way out that the refusal names."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(self.logger, CSVLogger)
        assert self.logger.log_dir
        return Net.training_step(self, batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.logger is not None
        self.logger.log_metrics({"loss": float(outputs["loss"])}, self.global_step)


@pytest.mark.parametrize("layout", ["1f1b", "zb_v"])
def test_a_step_that_writes_to_a_logger_is_refused(
    layout: str, ranks: Callable[[int], Ranks]
) -> None:
    words = "CSVLogger.log_metrics, which rank 0"
    case = f"{__name__}:Writing"
    for refusal in ranks(2).refusals(train, case=case, strategy=LAYOUTS[layout]):
        assert isinstance(refusal, ModelError)
        assert words in str(refusal)


def test_hooks_write_what_steps_return(ranks: Callable[[int], Ranks]) -> None:
    stock, piped = equal_to_stock(ranks, Behind, "1f1b")
    assert len(stock.logged) == 4
    for row, wanted in zip(piped[0].logged, stock.logged, strict=True):
        assert row == pytest.approx(wanted, abs=TOLERANCE)
