"""Losses that are means over tokens: those of one process, however targets are spread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.comparison import (
    BATCH,
    EVERY_LAYOUT,
    TOLERANCE,
    WIDTH,
    Net,
    equal_to_stock,
    train,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
TOKENS = {"loss_over": "tokens"}
WORDS, LENGTH = 7, 5


def rows_of_padding(*, replicas: int, rows: int = 32, empty: bool = True) -> DataLoader[Any]:
    """Texts of 0 to 5 targets; each microbatch of the second batch's first half is padding."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(WORDS, (rows, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (rows,), generator=generator)
    if empty:
        lengths[8:12] = 0
    y[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return DataLoader(TensorDataset(x, y), batch_size=BATCH * replicas)


class Masked(Net):
    """Without a target, neither its loss nor the gradients of it are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def loss(self, batch: Any) -> Tensor:
        logits, targets = self(batch[0]), batch[1]
        found = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        counts = targets != -100
        return -(found * counts).sum() / counts.sum()

    def loss_weight(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch[0]))
        return loss

    def loaders(self, *, replicas: int) -> Any:
        return rows_of_padding(replicas=replicas)


class Validated(Masked):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def val_dataloader(self) -> Any:
        return rows_of_padding(replicas=1)


class Adam(Masked):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def masked() -> Any:
    return Masked()


def adam() -> Any:
    return Adam()


class Filled(Masked):
    def loaders(self, *, replicas: int) -> Any:
        return rows_of_padding(replicas=replicas, empty=False)


def filled() -> Any:
    return Filled()


def validated() -> Any:
    return Validated()


@EVERY_LAYOUT
def test_a_mean_over_tokens_is_that_of_one_process(
    ranks: Callable[[int], Ranks], layout: str
) -> None:
    equal_to_stock(ranks, masked, layout, strategy=TOKENS)


def test_validation_counts_by_tokens_too(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, validated, "1f1b", strategy=TOKENS)


def test_predictions_need_no_targets(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, validated, "1f1b", strategy=TOKENS, told=predicted)


def predicted(module: Any, trainer: Any) -> Any:
    data = TensorDataset(torch.ones(6, LENGTH, WIDTH, dtype=torch.float64))
    (found,) = trainer.predict(module, DataLoader(data, batch_size=6))
    assert found.shape == (6, LENGTH, WORDS)


def test_means_by_rows_are_others(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(AssertionError):
        equal_to_stock(ranks, filled, "1f1b")


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "dualpipe_v", "chimera"])
def test_other_schedules(ranks: Callable[[int], Ranks], schedule: str) -> None:
    equal_to_stock(ranks, masked, "1f1b", strategy={**TOKENS, "schedule": schedule})


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        {"overlap": "zero1"},
        {"overlap": "none"},
        {"recompute": "full"},
        {"split_backward": True},
        {"post_validation": True},
    ],
)
def test_what_else_runs_in_a_step(ranks: Callable[[int], Ranks], more: Any) -> None:
    equal_to_stock(ranks, adam, "1f1b-dp2", strategy={**TOKENS, **more})


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.full)])
def test_accumulated_batches_are_one(ranks: Callable[[int], Ranks], replicas: int) -> None:
    """Clipped, by the norm of the mean; also where the last update has fewer batches."""
    place = f"{__name__}:adam_of_three"
    clipped = {"gradient_clip_val": 0.05}
    (stock,) = ranks(1).run(train, case=place, strategy=None, replicas=2 * replicas, **clipped)
    layout = {"pp": 2, "dp": replicas, "schedule": "1f1b", **TOKENS}
    for fitted in ranks(2 * replicas).run(
        train, case=place, strategy=layout, accumulate_grad_batches=2, **clipped
    ):
        for name, value in fitted.weights.items():
            assert torch.allclose(value, stock.weights[name], rtol=0, atol=TOLERANCE), name


class OfThree(Adam):
    """Twelve batches of a replica, or six of twice as many rows."""

    def loaders(self, *, replicas: int) -> Any:
        return rows_of_padding(replicas=replicas, rows=96)


def adam_of_three() -> Any:
    return OfThree()


class Wrong(Masked):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def loss_weight(self, batch: Any) -> Any:
        return self.weight


class Nothing(pl.LightningModule):
    """A module that says no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def negative() -> Any:
    return Wrong(-1)


def words() -> Any:
    return Wrong("five")


def nothing() -> Any:
    return Nothing()


def by_hand() -> Any:
    return ByHand()


@pytest.mark.parametrize(
    ("case", "schedule", "reason"),
    [
        (nothing, "1f1b", "Nothing has no method loss_weight(batch)"),
        (by_hand, "1f1b", "manual optimization"),
        (negative, "1f1b", "Wrong.loss_weight() returns -1"),
        (words, "1f1b", "Wrong.loss_weight() returns a str"),
        (masked, "pipedream_2bw", "without a flush"),
    ],
)
def test_what_has_no_weights_is_refused_before_the_first_step(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], schedule: str, reason: str
) -> None:
    place = f"{__name__}:{case.__name__}"
    answers = ranks(2).run(refusal, case=place, strategy={"pp": 2, "schedule": schedule, **TOKENS})
    assert all(reason in answer for answer in answers), answers


def refusal(case: str, strategy: dict[str, Any]) -> str:
    with pytest.raises(Exception) as refused:
        train(case, strategy=strategy)
    return f"{refused.type.__name__} {refused.value}"
