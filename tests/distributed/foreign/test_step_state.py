"""What steps leave on the module, and hooks that look at it: as under stock Lightning."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from tests.ranks.comparison import (
    CLASSES,
    EVERY_LAYOUT,
    TOLERANCE,
    WIDTH,
    Fitted,
    Net,
    equal_to_stock,
    examples,
    train,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
ONE_REPLICA = pytest.mark.parametrize(
    "layout", ["1f1b", pytest.param("zb_v", marks=pytest.mark.full)]
)


class Lists(Net):
    """What a step appends is there at the end of the epoch; a list of the class, too."""

    losses: list[Tensor] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.losses.clear()
        self.rows: list[dict[str, Tensor]] = []
        self.by_kind: dict[str, list[float]] = defaultdict(list)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.by_kind["train"].append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        kept = self.by_kind["train"]
        self.log("t", sum(kept) / len(kept), sync_dist=True)
        self.log("t_n", float(len(kept)), sync_dist=True)
        kept.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        loss = cross_entropy(z, batch[1])
        self.losses.append(loss)
        self.rows.append({"p": z.argmax(1), "y": batch[1]})
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("v", torch.stack(self.losses).mean(), sync_dist=True)
        p = torch.cat([row["p"] for row in self.rows])
        y = torch.cat([row["y"] for row in self.rows])
        self.log("acc", (p == y).double().mean(), sync_dist=True)
        self.log("n", float(len(self.losses)), sync_dist=True)
        self.losses.clear()
        self.rows.clear()


class Meter:
    """Somebody's AverageMeter."""

    def __init__(self) -> None:
        self.sum = self.count = 0.0

    def update(self, value: float, n: int) -> None:
        self.sum += value * n
        self.count += n


class Sums(Net):
    """Numbers that a step adds up: means, counts, both in an object."""

    means = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.correct = self.total = 0
        self.meter = Meter()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self(batch[0])
        loss = cross_entropy(z, batch[1])
        self.means += float(loss)
        self.correct += int((z.argmax(1) == batch[1]).sum())
        self.total += len(batch[1])
        self.meter.update(loss.item(), n=len(batch[1]))

    def on_validation_epoch_end(self) -> None:
        assert isinstance(self.total, int)
        self.log("means", self.means, sync_dist=True)
        self.log("acc", self.correct / self.total, sync_dist=True)
        self.log("meter", self.meter.sum / self.meter.count, sync_dist=True)


class Annealed(Net):
    """A counter of steps is a factor in the first layers and in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("center", torch.zeros(CLASSES, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.n += 1
        self.seen += 1
        beta = min(1.0, self.n / 3)
        z = self(batch[0] * beta / self.seen)
        loss = cross_entropy(z - self.center, batch[1]) * (1 + 1 / self.n)
        with torch.no_grad():
            self.center = self.center * 0.9 + z.detach().mean(0) * 0.1
        return loss


class Codebook(Net):
    """A large buffer that the step changes behind its layers, and reads before them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.full((40, WIDTH), 0.1, dtype=torch.float64))
        self.recent: deque[Tensor] = deque(maxlen=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x + self.codes[y]
        for z in self.recent:
            x = x + 0.1 * z.mean()
        z = self(x)
        with torch.no_grad():
            found = one_hot(y, 40).to(z).T @ torch.cat([z, z, z], 1)[:, :WIDTH] / len(y)
            self.codes.mul_(0.9).add_(found, alpha=0.1)
            self.recent.append(torch.cat([z] * 4).detach().clone())
        return cross_entropy(z, y)


class Curved(Net):
    """Numbers that are no means over microbatches."""

    def step(self, batch: Any, kind: str) -> Tensor:
        z = self(batch[0])
        mse = mse_loss(z, one_hot(batch[1], CLASSES).to(z))
        self.log(f"{kind}_mse", mse, on_step=False, on_epoch=True)
        self.log(f"{kind}_rmse", mse.sqrt(), on_step=False, on_epoch=True)
        self.log_dict({f"{kind}_std": z.std(), f"{kind}_n": float(len(z))}, on_epoch=True)
        return mse

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val")


class Outputs(Net):
    """Hooks behind a batch get what the step has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(batch[0])
        loss = cross_entropy(z, batch[1])
        return {
            "loss": loss,
            "z": z.detach(),
            "kind": "t",
            "n": len(z),
            "nested": [z.detach().sum(), (1, None)],
        }

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(batch[0])
        return z.argmax(1) if batch_idx else cross_entropy(z, batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"p": self(batch[0]).softmax(1), "names": [f"{v:.6f}" for v in batch[0][:, 0]]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.got.append({k: v for k, v in outputs.items() if k != "loss"})
        self.log("from_hook", outputs["z"].sum())

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.got.append(outputs)


def watched(trainer: Any) -> Any:
    return next(callback for callback in trainer.callbacks if type(callback) is Watcher).got


class Watcher(pl.Callback):
    """A callback that collects from the module."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.got.append(outputs)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(pl_module, "rows"):
            self.got.append([{k: v.clone() for k, v in row.items()} for row in pl_module.rows])


def watchers() -> Sequence[Any]:
    return [Watcher()]


def told_outputs(module: Any, trainer: Any) -> Any:
    trainer.test(module, examples(seed=3), verbose=False)
    return module.got, trainer.callbacks[
        [type(c) is Watcher for c in trainer.callbacks].index(True)
    ].got


def told_rows(module: Any, trainer: Any) -> Any:
    return watched(trainer)


def told_counter(module: Any, trainer: Any) -> Any:
    return module.n, int(module.seen)


@EVERY_LAYOUT
def test_lists_of_an_epoch(layout: str, ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, Lists, layout, max_epochs=2, num_sanity_val_steps=1)


@ONE_REPLICA
def test_callbacks_see_what_steps_have_left(layout: str, ranks: Callable[[int], Ranks]) -> None:
    stock, piped = equal_to_stock(
        ranks, Lists, layout, callbacks=watchers, told=told_rows, max_epochs=2
    )
    same_told(stock, piped)


@EVERY_LAYOUT
def test_sums_of_an_epoch(layout: str, ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, Sums, layout)


@ONE_REPLICA
def test_a_counter_counts_batches_on_every_stage(
    layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, piped = equal_to_stock(
        ranks, Annealed, layout, told=told_counter, buffers=["center", "seen"], max_epochs=2
    )
    assert [fitted.told for fitted in piped] == [stock.told] * len(piped) == [(8, 8)] * len(piped)


@ONE_REPLICA
def test_numbers_that_are_no_means(layout: str, ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, Curved, layout, max_epochs=2)


@ONE_REPLICA
def test_hooks_behind_a_batch_get_its_output(layout: str, ranks: Callable[[int], Ranks]) -> None:
    stock, piped = equal_to_stock(ranks, Outputs, layout, callbacks=watchers, told=told_outputs)
    same_told(stock, piped)


def same_told(stock: Fitted, piped: list[Fitted]) -> None:
    assert stock.told
    for fitted in piped:
        same(fitted.told, stock.told)


def same(value: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert value.shape == wanted.shape
        assert torch.allclose(value, wanted, rtol=0, atol=TOLERANCE)
    elif isinstance(wanted, dict):
        assert list(value) == list(wanted)
        for key in wanted:
            same(value[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert type(value) is type(wanted)
        assert len(value) == len(wanted)
        for one, other in zip(value, wanted, strict=True):
            same(one, other)
    else:
        assert value == wanted


class Told(Net):
    """The numbers of a training, as users look at them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        self.log("rows", float(len(batch[1])), reduce_fx="sum")
        self.log("largest", batch[0].max(), reduce_fx="max")
        return loss


def told_bar(module: Any, trainer: Any) -> Any:
    return float(trainer.progress_bar_metrics["train_loss"])


@pytest.mark.parametrize(
    "strategy",
    [
        {"pp": 4, "dp": 1},
        pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.full),
        {"pp": 2, "dp": 2, "schedule": "zb_v"},
    ],
)
def test_a_loss_is_that_of_all_replicas(strategy: Any, ranks: Callable[[int], Ranks]) -> None:
    replicas = 2
    case, told = f"{__name__}:Told", f"{__name__}:told_bar"
    (stock,) = ranks(1).run(train, case=case, told=told, strategy=None, replicas=replicas)
    given = {"replicas": replicas} if strategy["dp"] == 1 else {}
    for fitted in ranks(4).run(train, case=case, told=told, strategy=strategy, **given):
        assert fitted.told == pytest.approx(stock.told, abs=TOLERANCE)
        assert fitted.metrics == pytest.approx(stock.metrics, abs=TOLERANCE)
        for row, wanted in zip(fitted.logged, stock.logged, strict=False):
            assert row == pytest.approx(wanted, abs=TOLERANCE)


@ONE_REPLICA
def test_a_large_tensor_that_a_step_changes_is_the_same_on_earlier_stages(
    layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, Codebook, layout, buffers=["codes"])
