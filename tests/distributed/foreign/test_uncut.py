"""At pp=1 a step that cannot be cut runs whole, once per batch, as under stock Lightning."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.ranks.comparison import (
    TOLERANCE,
    WIDTH,
    Net,
    equal_to_stock,
)
from tests.ranks.pool import Ranks


class Physics(Net):
    """A network whose derivatives by its inputs are in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_(True)
        u = self(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = (slope.sum(-1) - u[:, 0]).pow(2).mean()
        self.log("residual", slope.pow(2).mean(), on_epoch=True)
        return {"loss": loss, "seen": u.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("heard", outputs["seen"].sum())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val", loss)


class Late(Physics):
    """Takes the derivatives from its second epoch on, when its step has been cut already."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 0:
            return functional.cross_entropy(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)["loss"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert "loss" in outputs


class Learner(Net):
    """MAML: a step of gradient descent inside the step, through which gradients go."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = dict(self.head.named_parameters())
        hidden = self.net(batch[0])
        loss = functional.cross_entropy(functional.linear(hidden, *weights.values()), batch[1])
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        fast = [w - 0.3 * s for w, s in zip(weights.values(), slopes, strict=True)]
        return functional.cross_entropy(functional.linear(hidden, *fast), batch[1])


class Critic(Net):
    """WGAN-GP: the norm of a gradient at a random mixture of two kinds of rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        real, other = batch[0], torch.randn_like(batch[0])
        share = torch.rand(len(real), 1, dtype=real.dtype)
        mixed = (share * real + (1 - share) * other).requires_grad_(True)
        (slope,) = torch.autograd.grad(self(mixed).sum(), mixed, create_graph=True)
        self.log("drawn", share.mean())
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        return self(other).mean() - self(real).mean() + 10 * penalty


class EarlyExit(Net):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.net):
            x = layer(x)
            if number == 3 and x.abs().mean() < 0.3:
                break
        return self.head(x)  # type: ignore[no-any-return]


class Memory(Net):
    """A recurrent network that begins a batch where it ended the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.hidden: Tensor | None = None
        self.steps = 0

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def forward(self, x: Tensor) -> Tensor:
        before = torch.zeros_like(x) if self.hidden is None else self.hidden
        after = self.cell(self.net(x), before)
        self.hidden = after.detach()
        self.steps += 1
        return self.head(after)  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        self.log("steps", float(self.steps))


class Arrays(Net):
    """Numpy between two layers, dropout, and numbers of Python's own generator."""

    def __init__(self) -> None:
        super().__init__()
        random.seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        scale = float(hidden.detach().numpy().std()) + random.random()
        return functional.cross_entropy(
            self.head(functional.dropout(hidden / scale, 0.3)), batch[1]
        )


class Mapped(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.vmap(lambda row: row * row.sum())(self.net(x)))  # type: ignore[no-any-return]


class Codebook(Net):
    """A module without parameters that has a buffer, which each step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.BatchNorm1d(WIDTH, affine=False)
        self.book.register_buffer("far", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.book(self.net(x))
        if hidden.max() > self.book.far:
            self.book.far = hidden.detach().max()
        return self.head(hidden * self.book.far)  # type: ignore[no-any-return]


def bare() -> pl.LightningModule:
    """A lone parameter of the module itself, beside an iterator that the step takes further."""
    net = Net()
    net.scale = nn.Parameter(torch.ones(WIDTH))
    net.items = iter(range(1, 1000))
    net.forward = lambda x: net.head(net.net(x) * net.scale * (1 + 1 / next(net.items)))  # type: ignore[method-assign, arg-type, operator]
    return net


class Writes(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with tempfile.TemporaryFile("w") as file:
            file.write(f"{len(batch[0])} {loss.detach()}")
        return loss


class ByHand(Physics):
    """The derivatives by hand: two backwards, clipping, weights that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.spare = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if batch_idx != 1:  # whose gradients go on
            optimizer.zero_grad()
        given = super().training_step(batch, batch_idx)
        self.manual_backward(given["loss"])
        other = functional.cross_entropy(self(batch[0]), batch[1])
        if batch_idx == 2:
            other = other + self.spare(batch[0]).pow(2).mean()
        self.manual_backward(other)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", other)
        return given

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.3)


class SharedByHand(ByHand):
    """Without what is no mean over the rows of all replicas."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("known", float("loss" in outputs))


class ClosureByHand(SharedByHand):
    """A backward inside of the optimizer's step, from the second epoch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            inside = x.clone().requires_grad_(True)
            u = self(inside)
            loss = functional.cross_entropy(u, y)
            if self.current_epoch:
                (slope,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
                loss = loss + slope.pow(2).mean()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)
        return {"loss": torch.ones(())}


BY_HAND: list[Callable[[], pl.LightningModule]] = [ByHand, ClosureByHand]
CASES: list[Callable[[], pl.LightningModule]] = [
    Physics, Late, Learner, Critic, EarlyExit, Memory, Arrays, Mapped, Codebook, Writes, bare,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_step_runs_whole(ranks: Callable[[int], Ranks], case: Callable[[], Any]) -> None:
    books = [name for name, _ in case().named_buffers()]
    stock, (whole,) = equal_to_stock(
        ranks, case, "1f1b", strategy={"pp": 1}, buffers=books, max_epochs=2,
        accumulate_grad_batches=2,
    )  # fmt: skip
    assert whole.logged == [pytest.approx(row, abs=TOLERANCE) for row in stock.logged]


@pytest.mark.parametrize("case", BY_HAND, ids=lambda case: case.__name__)
def test_step_by_hand_runs_whole(ranks: Callable[[int], Ranks], case: Callable[[], Any]) -> None:
    stock, (whole,) = equal_to_stock(ranks, case, "1f1b", strategy={"pp": 1}, max_epochs=2)
    assert stock.logged
    assert whole.logged == [pytest.approx(row, abs=TOLERANCE) for row in stock.logged]


def test_replicas_add_up_what_runs_whole_by_hand(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, SharedByHand, "1f1b", strategy={"pp": 1, "dp": 2}, max_epochs=2)


def test_replicas_add_up_what_runs_whole(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, Late, "1f1b", strategy={"pp": 1, "dp": 2}, max_epochs=2)
