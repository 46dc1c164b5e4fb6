"""What a step draws, as stock Lightning draws it, and rows that it mixes: those of a microbatch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.ranks.comparison import (
    BATCH,
    CLASSES,
    LAYOUTS,
    MICROBATCHES,
    TOLERANCE,
    WIDTH,
    Net,
    equal_to_stock,
    examples,
    spread,
    train,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class VAE(Net):
    """An encoder, a draw in the middle, a decoder; noise in every way that people write it."""

    def __init__(self, how: str = "randn_like") -> None:
        super().__init__()
        self.how = how
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        del self.net, self.head

    def noise(self, mean: Tensor, log_var: Tensor) -> Tensor:
        std = (0.5 * log_var).exp()
        if self.how == "distribution":
            return torch.distributions.Normal(mean, std).rsample()
        if self.how == "normal_":
            return mean + std * torch.empty_like(std).normal_()
        return mean + std * torch.randn_like(std)

    def step(self, batch: Any) -> tuple[Tensor, Tensor]:
        x = batch[0]
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        again = self.decoder(self.noise(mean, log_var))
        divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
        return functional.mse_loss(again, x), divergence

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        reconstruction, divergence = self.step(batch)
        self.log("kl", divergence)
        return reconstruction + 0.1 * divergence

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", sum(self.step(batch)))


class Diffusion(Net):
    """Timesteps and noise at the beginning of the step, and both in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 50, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        times = torch.randint(0, 50, (x.size(0),), device=x.device)
        noise = torch.randn_like(x)
        alpha = self.alphas[times].unsqueeze(1)
        seen = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        loss = functional.mse_loss(self(seen + times.unsqueeze(1) / 50), noise)
        self.log("train_loss", loss)
        self.log("times", times.double().mean())
        return loss


class Mixed(Net):
    """Rows that are mixed before the network, and their labels with them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        mix: Callable[[Tensor, Tensor], Any] = getattr(self, self.how)
        x, first, second, share = mix(x, y)
        z = self(x)
        loss = share * functional.cross_entropy(z, first) + (1 - share) * functional.cross_entropy(
            z, second
        )
        self.log("loss", loss)
        return loss

    def flip(self, x: Tensor, y: Tensor) -> Any:
        return 0.7 * x + 0.3 * x.flip(0), y, y.flip(0), 0.7

    def roll(self, x: Tensor, y: Tensor) -> Any:
        return 0.7 * x + 0.3 * x.roll(1, 0), y, y.roll(1, 0), 0.7

    def sort(self, x: Tensor, y: Tensor) -> Any:
        order = x[:, 0].argsort()
        return x[order] - x.mean(0), y[order], y, 0.9


class Alone(Mixed):
    """The same rows, a microbatch's in each batch: under stock Lightning with accumulation."""

    def loaders(self, replicas: int) -> Any:
        return DataLoader(examples().dataset, batch_size=BATCH // MICROBATCHES)


class Mixup(Net):
    """A share that is drawn for the batch, and an order that is drawn for its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        share = torch.distributions.Beta(0.4, 0.4).sample()
        order = torch.randperm(x.size(0))
        then = torch.rand_like(x)
        z = self(share * x + (1 - share) * x[order] + then)
        loss = share * functional.cross_entropy(z, y)
        self.log("share", share)
        self.log("rows", float(len(order)))
        self.log("then", then.mean())
        return loss + (1 - share) * functional.cross_entropy(z, y[order])


class Views(Net):
    """Two views of each row, under noise of which nobody knows which row it belongs to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        views = torch.cat([batch[0], batch[0].flip(1)])
        noise = torch.randn_like(views)
        self.log("noise", noise.mean())
        self.log("largest", noise.mean(), reduce_fx="max", on_step=True, on_epoch=False)
        first, second = self(views + 0.1 * noise).chunk(2)
        return functional.mse_loss(first, second) + functional.cross_entropy(first, batch[1])


class OnHost(Net):
    """Python's and numpy's numbers of a batch, and where they stand behind it."""

    def __init__(self) -> None:
        super().__init__()
        random.seed(0)
        np.random.seed(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        share = np.random.beta(0.4, 0.4)
        if random.random() < 0.5:
            x = x.flip(1)
        self.log("share", share)
        return share * functional.cross_entropy(self(x), y)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("behind", random.random() + np.random.rand())


class Seeded(Net):
    """Seeds of a step's own, for good and for a while."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        torch.manual_seed(batch_idx)
        x = self.net[:4](x + torch.randn_like(x))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            x = x + torch.randn_like(x)
        x = self.net[4:](x)
        return functional.cross_entropy(self.head(x + torch.randn_like(x)), y)


class Kept(Net):
    """What a step keeps of its loss is of the noise that it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = MeanMetric()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn_like(batch[0])
        loss = (self(batch[0] + noise) - noise[:, :CLASSES]).pow(2).mean()
        self.losses(loss)
        self.log("loss", self.losses)
        self.seen.append(loss.detach())
        return loss


class Sorted(Net):
    """Rows in another order on their way through the layers, and back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        order = x[:, 0].argsort()
        hidden = self.net(x[order])[order.argsort()]
        return functional.cross_entropy(self.head(hidden), y)


class Places(Net):
    """Numbers of rows, by which a step takes one entry of each."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self(x + torch.randn_like(x))
        return -z.log_softmax(1)[torch.arange(len(x)), y].mean()


class OwnGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return functional.cross_entropy(self(x + noise), y)


class Dropped(Net):
    """Chance before the layers, between them row by row, and from a seed of the step's own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = functional.dropout(x, 0.2)
        x = x.masked_fill(torch.rand_like(x) < 0.2, 0.0)
        places = torch.multinomial(torch.ones(len(x), WIDTH), 2)
        x = x + torch.zeros_like(x).scatter_(1, places, 1.0)
        for layer in self.net:
            kept = torch.bernoulli(torch.full((len(x), 1), 0.8, dtype=x.dtype))
            x = x + kept * layer(x)
        torch.manual_seed(7 + batch_idx)
        y = torch.where(torch.rand(len(y)) < 0.2, torch.randint_like(y, CLASSES), y)
        return functional.cross_entropy(self.head(x), y)


class Recurrent(Net):
    """The first state is drawn, and rows are its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        state = tuple(torch.randn(1, len(x), WIDTH, dtype=x.dtype) for _ in range(2))
        given, _ = self.layer(x[:, None].expand(-1, 3, -1), state)
        return functional.cross_entropy(self(given[:, -1]), y)


class Hidden(Net):
    """Rows mixed by chance between layers, and their labels alike: those of a microbatch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        order = torch.randperm(len(x))
        hidden = self.net(x)
        z = self.head(0.5 * hidden + 0.5 * hidden[order])
        self.log("pairs", (y[order] == y[order]).float().mean())
        return functional.cross_entropy(z, y) + functional.cross_entropy(z, y[order])


def vae() -> pl.LightningModule:
    return VAE()


def distribution() -> pl.LightningModule:
    return VAE("distribution")


def in_place() -> pl.LightningModule:
    return VAE("normal_")


def diffusion() -> pl.LightningModule:
    return Diffusion()


def flip() -> pl.LightningModule:
    return Mixed("flip")


def roll() -> pl.LightningModule:
    return Mixed("roll")


def sort() -> pl.LightningModule:
    return Mixed("sort")


def flip_alone() -> pl.LightningModule:
    return Alone("flip")


def roll_alone() -> pl.LightningModule:
    return Alone("roll")


def sort_alone() -> pl.LightningModule:
    return Alone("sort")


@spread(
    [
        vae,
        diffusion,
        Kept,
        Sorted,
        OwnGenerator,
        Dropped,
        Recurrent,
        OnHost,
        Seeded,
    ],
    seldom=[distribution, in_place, Places],
)
def test_noise_is_drawn_for_all_rows_at_once(
    ranks: Callable[[int], Ranks], case: Callable[[], pl.LightningModule], layout: str
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2)


@pytest.mark.parametrize("case", [vae, pytest.param(diffusion, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp2-tp2", marks=pytest.mark.full)])
def test_ranks_that_share_matrices_draw_the_same(
    ranks: Callable[[int], Ranks], case: Callable[[], pl.LightningModule], layout: str
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1f1b", "zb_v-dp2"])
def test_a_forward_that_runs_again_has_the_noise_of_the_first_time(
    ranks: Callable[[int], Ranks], layout: str
) -> None:
    """Also in the first step, in which the losses of parts and of the whole are compared."""
    equal_to_stock(ranks, vae, layout, strategy={"recompute": "full"})


@pytest.mark.parametrize("layout", ["1f1b", pytest.param("zb_v", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("case", "alone"),
    [
        (flip, flip_alone),
        (sort, sort_alone),
        pytest.param(roll, roll_alone, marks=pytest.mark.full),
    ],
)
def test_rows_that_a_step_mixes_are_mixed_in_microbatches_as_under_accumulation(
    ranks: Callable[[int], Ranks], case: Any, alone: Any, layout: str
) -> None:
    (stock,) = ranks(1).run(
        train,
        case=f"{__name__}:{alone.__name__}",
        strategy=None,
        accumulate_grad_batches=MICROBATCHES,
    )
    fitted = ranks(2).run(train, case=f"{__name__}:{case.__name__}", strategy=LAYOUTS[layout])
    for each in fitted:
        for name, value in each.weights.items():
            assert torch.allclose(value, stock.weights[name], rtol=0, atol=TOLERANCE), name


def test_a_share_is_the_batchs_and_an_order_the_microbatchs(ranks: Callable[[int], Ranks]) -> None:
    """What is drawn behind the order is drawn as if that had been one of all rows."""
    name = f"{__name__}:Mixup"
    (stock,) = ranks(1).run(train, case=name, strategy=None)
    for fitted in ranks(2).run(train, case=name, strategy=LAYOUTS["1f1b"]):
        assert stock.metrics["rows"] == BATCH
        assert fitted.metrics["rows"] == BATCH // MICROBATCHES
        for same in ("share", "then"):
            assert fitted.metrics[same] == pytest.approx(stock.metrics[same], abs=TOLERANCE)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_is_not_drawn_by_row_differs_between_microbatches(
    ranks: Callable[[int], Ranks], replicas: int
) -> None:
    layout = LAYOUTS["1f1b" if replicas == 1 else "1f1b-dp2"]
    first, *others = ranks(2 * replicas).run(train, case=f"{__name__}:Views", strategy=layout)
    # The largest mean of a microbatch's noise is that of all microbatches if these are the same.
    assert first.metrics["largest"] > first.metrics["noise"] + 1e-3
    assert all(fitted.metrics == first.metrics for fitted in others)


def test_without_a_flush_each_batch_draws_behind_the_one_before(
    ranks: Callable[[int], Ranks],
) -> None:
    name = f"{__name__}:diffusion"
    (stock,) = ranks(1).run(train, case=name, strategy=None, max_epochs=2)
    strategy = {"pp": 2, "schedule": "pipedream_2bw"}
    for fitted in ranks(2).run(train, case=name, strategy=strategy, max_epochs=2):
        assert fitted.metrics["times"] == pytest.approx(stock.metrics["times"], abs=TOLERANCE)


def test_what_permutes_values_of_layers_permutes_those_of_a_microbatch(
    ranks: Callable[[int], Ranks],
) -> None:
    for fitted in ranks(2).run(train, case=f"{__name__}:Hidden", strategy={"pp": 2}):
        assert fitted.metrics["pairs"] == 1.0
