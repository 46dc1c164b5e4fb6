"""What sees the rows of a microbatch where its author has thought of a batch is said, once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.plan import Plan
from strategies.runtime.lightning.refusals import refuse_module
from strategies.runtime.lightning.rows_told import RowsTold
from tests.ranks.comparison import WIDTH, Net, train
from tests.ranks.pool import Ranks

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


class Between(Net):
    """Something between two layers that lie on two stages."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = batch[0]
        for number, layer in enumerate(self.net):
            hidden = layer(self.between(hidden) if number else hidden)
        return nn.functional.cross_entropy(self.head(hidden), batch[1])


class Flipped(Between):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden + hidden.flip(0)) / 2


class Shuffled(Between):
    """Manifold mixup."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return 0.7 * hidden + 0.3 * hidden[torch.randperm(len(hidden))]


class Centred(Between):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(dim=0)


class Harmless(Between):
    """Rows stay apart: noise, a scale of the row's own, values folded into rows and back."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(hidden, 0.1) + torch.randn_like(hidden) * 0.01
        hidden = hidden / (1 + hidden.norm(dim=-1, keepdim=True))
        return hidden.unflatten(1, (2, 4)).flatten(0, 1).view(len(hidden), 8)


class Reordered(Between):
    """Whole rows in another order, and back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        order = batch[0][:, 0].argsort()
        hidden = self.net(batch[0][order])[order.argsort()]
        return nn.functional.cross_entropy(self.head(hidden), batch[1])


class Spread(Net):
    """Logs numbers between layers: two are no means over rows, two are, and one is of all rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        self.log("std", hidden.std())
        self.log("rows", float(len(hidden)))
        self.log("mean", hidden.mean())
        self.log("most", hidden.max(), reduce_fx="max")
        loss = torch.nn.functional.cross_entropy(self.head(self.net[4:](hidden)), batch[1])
        self.log("late", hidden.std())
        return loss


class InLaterBatch(InBatch):
    """Rows are compared from the second batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class Detached(Net):
    """Only the later layers learn, and nobody has frozen the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0]).detach()
        return nn.functional.cross_entropy(self.head(self.net[4:](hidden)), batch[1])


class DetachedNowAndThen(Net):
    """A layer lets no gradient through in the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = Valve()


class Valve(nn.Linear):
    """Counts its forwards; nobody looks into a layer for what it decides by."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x if self.calls < 6 else x.detach())


class Decorrelated(Net):
    """A second loss that compares rows of a hidden layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        products = hidden.T @ hidden / len(hidden)
        apart = (products - torch.diag(products.diag())).pow(2).sum()
        loss = nn.functional.cross_entropy(self.head(self.net[4:](hidden)), batch[1])
        return loss + 0.1 * apart


class SecondMean(Net):
    """A second loss that is a mean over rows, and a sum that is divided later."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        size = hidden.pow(2).sum()
        loss = nn.functional.cross_entropy(self.head(self.net[4:](hidden)), batch[1])
        return loss + 0.1 * hidden.abs().mean() + 0.1 * size / len(hidden)


class Gate(nn.Linear):
    """Gives what its experts' loads cost, beside their values."""

    def forward(self, x: Tensor) -> Any:
        chances = super().forward(x).softmax(-1)
        loads = nn.functional.one_hot(chances.argmax(-1), 8).to(chances.dtype).mean(0)
        return x * chances, (loads * chances.mean(0)).sum()


class Balanced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, load = self.gate(batch[0])
        return nn.functional.cross_entropy(self.head(self.net(hidden)), batch[1]) + load


class Keeps(Net):
    """A list of what becomes of the batch's first row."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        self.kept.append(self.kept_of(hidden).detach())
        return nn.functional.cross_entropy(self.head(self.net[4:](hidden)), batch[1])

    def kept_of(self, hidden: Tensor) -> Tensor:
        return hidden[0]


class KeepsSpread(Keeps):
    def kept_of(self, hidden: Tensor) -> Tensor:
        return hidden.std()


class KeepsMean(Keeps):
    def kept_of(self, hidden: Tensor) -> Tensor:
        return hidden.mean(0)


class WritesBatch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class WritesForHook(WritesBatch):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.size = float(batch[0].abs().mean())


def keeps() -> Any:
    return Keeps()


def keeps_spread() -> Any:
    return KeepsSpread()


def keeps_mean() -> Any:
    return KeepsMean()


def writes_batch() -> Any:
    return WritesBatch()


def writes_for_hook() -> Any:
    return WritesForHook()


def decorrelated() -> Any:
    return Decorrelated()


def second_mean() -> Any:
    return SecondMean()


def balanced() -> Any:
    return Balanced()


def in_later_batch() -> Any:
    return InLaterBatch()


def detached() -> Any:
    return Detached()


def detached_now_and_then() -> Any:
    return DetachedNowAndThen()


def spread_out() -> Any:
    return Spread()


def flipped() -> Any:
    return Flipped()


def shuffled() -> Any:
    return Shuffled()


def centred() -> Any:
    return Centred()


def harmless() -> Any:
    return Harmless()


def reordered() -> Any:
    return Reordered()


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


class HookedLater(Net):
    def on_train_start(self) -> None:
        self.head.weight.register_hook(lambda gradient: None)


class SteppedInBackward(Net):
    """An optimizer step the moment that a gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda weight: None)


def manual_normed() -> Any:
    return ManualNormed()


def hooked() -> Any:
    return Hooked()


def hooked_later() -> Any:
    return HookedLater()


class Listing(Net):
    """Names of classes beside the rows, as many as there are rows."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, [f"class {number}" for number in range(len(batch[0]))]]


def listing() -> Any:
    return Listing()


def stepped() -> Any:
    return SteppedInBackward()


class Unsized(Net):
    """A layer that takes its sizes from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.nn.LazyLinear(WIDTH)


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


def seldom(*row: Any) -> Any:
    """Of the full matrix alone."""
    return pytest.param(*row, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("case", "more", "expected"),
    [
        (normed, {}, ["net.2: BatchNorm takes its mean and variance over 2 rows", ""]),
        (manual_normed, {}, ["net.2: BatchNorm takes its mean and variance over 2 rows", ""]),
        (in_batch, {}, ["", "the loss of InBatch.training_step depends on how rows are grouped"]),
        (in_later_batch, {}, ["", "the loss of InLaterBatch.training_step depends on how rows"]),
        (decorrelated, {}, ["makes a number of all rows before its last layer", ""]),
        (balanced, {}, ["makes a number of all rows before its last layer", ""]),
        (keeps, {}, ["keeps or returns a value from before its last layer", ""]),
        (keeps_mean, {}, ["", ""]),
        (writes_for_hook, {}, ["WritesForHook.training_step changes its batch", ""]),
        (detached, {}, ["", ""]),
        (detached_now_and_then, {}, ["", "stage 1 has no gradient any more for a value"]),
        (in_batch, {"loss_over": "batch"}, ["", ""]),
        (row_by_row, {}, ["", ""]),
        (hooked, {}, ["net.0.weight has a hook (register_hook)", ""]),
        (hooked_later, {"num_microbatches": 1}, ["not on rank 0 those of head.weight", ""]),
        (listing, {}, ["batch[2] has the same 8 entries in two batches, as many as the batch", ""]),
        (flipped, {}, ["Flipped.training_step mixes rows of the batch between its layers", ""]),
        (centred, {}, ["Centred.training_step mixes rows of the batch between its layers", ""]),
        (harmless, {}, ["", ""]),
        (spread_out, {}, ["Spread.training_step logs std, rows before its last layer", ""]),
        (counting, {}, ["net.0.calls: layers change", "_u and 1 more: layers change"]),
        seldom(decorrelated, {"num_microbatches": 1}, ["", ""]),
        seldom(second_mean, {}, ["", ""]),
        seldom(keeps_spread, {}, ["keeps or returns a value from before its last layer", ""]),
        seldom(writes_batch, {}, ["", ""]),
        seldom(hooked, {"num_microbatches": 1}, ["", ""]),
        seldom(normed, {"num_microbatches": 1}, ["", ""]),
        seldom(
            shuffled, {}, ["Shuffled.training_step mixes rows of the batch between its layers", ""]
        ),
        seldom(flipped, {"num_microbatches": 1}, ["", ""]),
        seldom(reordered, {}, ["", ""]),
        seldom(counting, {"num_microbatches": 1}, ["", ""]),
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
    with pytest.raises(ModelError, match=r"head.weight has a hook of register_post_acc"):
        ranks(2).run(told, case=case, strategy={"pp": 2, "schedule": "1f1b"})


def test_layers_without_a_shape_are_refused() -> None:
    trainer: Any = SimpleNamespace(strategy=None)
    plan = Plan("1f1b", pp=2, num_microbatches=4)
    with pytest.raises(ModelError, match=r"net\.0\.weight gets its shape in the first forward"):
        refuse_module(trainer, Unsized(), plan, shared=False)
