"""What sees the rows of a microbatch where its author has thought of a batch is said, once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from strategies.runtime.lightning.user_module import RowsTold
from tests.distributed.foreign.comparison import Net, train
from tests.distributed.pool import Ranks

pytestmark = pytest.mark.distributed


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.BatchNorm1d(8))


class InBatch(Net):
    """Two views in one run: the loss compares rows, and each row's own two values."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self(torch.cat([batch[0], -batch[0]])).chunk(2)
        return nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))


class RowByRow(Net):
    """The same without a comparison of rows: nothing is to be said."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self(torch.cat([batch[0], -batch[0]])).chunk(2)
        self.log("apart", (first - second).abs().mean())
        return (first - second + 1).square().mean()


class Counted(nn.Linear):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Counting(Net):
    """One layer on the first stage, one on the last."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = Counted()
        self.net.append(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))


def counting() -> Any:
    return Counting()


def normed() -> Any:
    return Normed()


def in_batch() -> Any:
    return InBatch()


def row_by_row() -> Any:
    return RowByRow()


class ManualNormed(Normed):
    """The same with an optimizer step by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]


class Hooked(Net):
    """A limit to each gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class SteppedInBackward(Net):
    """An optimizer step the moment that a gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda weight: None)


def manual_normed() -> Any:
    return ManualNormed()


def hooked() -> Any:
    return Hooked()


def stepped() -> Any:
    return SteppedInBackward()


def told(case: str, strategy: dict[str, Any]) -> list[str]:
    """What a rank says of its rows while it trains for two batches."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("strategies.runtime.lightning.strategy")
    log.addHandler(handler)
    try:
        train(case, strategy=strategy, max_steps=2)
    finally:
        log.removeHandler(handler)
    return said


@pytest.mark.parametrize(
    ("case", "more", "expected"),
    [
        (normed, {}, ["net.2: BatchNorm takes its mean and variance over 2 rows", ""]),
        (manual_normed, {}, ["net.2: BatchNorm takes its mean and variance over 2 rows", ""]),
        (in_batch, {}, ["", "the loss of InBatch.training_step depends on how rows are grouped"]),
        (in_batch, {"loss_over": "batch"}, ["", ""]),
        (row_by_row, {}, ["", ""]),
        (hooked, {}, ["net.0.weight has a hook (register_hook)", ""]),
        (hooked, {"num_microbatches": 1}, ["", ""]),
        (normed, {"num_microbatches": 1}, ["", ""]),
        (counting, {}, ["net.0.calls: layers change", "_u and 1 more: layers change"]),
        (counting, {"num_microbatches": 1}, ["", ""]),
    ],
)
def test_it_is_said_once_by_the_rank_that_knows(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], more: Any, expected: list[str]
) -> None:
    options = {"pp": 2, "schedule": "1f1b", **more}
    answers = ranks(2).run(told, case=f"{__name__}:{case.__name__}", strategy=options)
    for said, words in zip(answers, expected, strict=True):
        assert len(said) == bool(words), said
        assert all(words in message for message in said)


def test_norms_that_do_not_train_say_nothing() -> None:
    module = Normed()
    told = RowsTold(module)
    module.net[2].eval()
    assert told.layers(8, 4) is None


def test_steps_inside_a_backward_are_refused(ranks: Callable[[int], Ranks]) -> None:
    case = f"{__name__}:stepped"
    with pytest.raises(AssertionError, match=r"head.weight has a hook of register_post_acc"):
        ranks(2).run(told, case=case, strategy={"pp": 2, "schedule": "1f1b"})
