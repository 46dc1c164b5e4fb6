"""Noise and mixtures of rows, which a step makes for all rows of a batch: as stock Lightning's."""

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
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from strategies.errors import ModelError
from tests.ranks.comparison import (
    CLASSES,
    WIDTH,
    Net,
    equal_to_stock,
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
        random.seed(0)
        np.random.seed(0)

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

    def permutation(self, x: Tensor, y: Tensor) -> Any:
        share = torch.distributions.Beta(0.4, 0.4).sample().item()
        order = torch.randperm(x.size(0))
        return share * x + (1 - share) * x[order], y, y[order], share

    def numpy(self, x: Tensor, y: Tensor) -> Any:
        share = np.random.beta(0.4, 0.4)
        order = torch.from_numpy(np.random.permutation(len(x)))
        return share * x + (1 - share) * x[order], y, y[order], share

    def python(self, x: Tensor, y: Tensor) -> Any:
        share = random.random()
        if random.random() < 0.5:
            x = x.flip(1)
        return x * torch.tensor([random.random() for _ in x]).unsqueeze(1), y, y, share


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


class Views(Net):
    """Two views of each row, in one batch of twice as many, under noise of their own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        views = torch.cat([batch[0], batch[0].flip(1)])
        first, second = self(views + 0.1 * torch.randn_like(views)).chunk(2)
        return functional.mse_loss(first, second) + functional.cross_entropy(first, batch[1])


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


class Rescaled(Net):
    """The largest number of the batch is in one microbatch; noise goes into a checkpoint."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        order = (10 * x[:, 1]).long().argsort(descending=True, stable=True)
        x = (x / x.abs().max() + 0.1 * torch.randn_like(x))[order]
        hidden = checkpoint(self.net, x, use_reentrant=False)
        return functional.cross_entropy(self.head(hidden), y[order])


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


class Advantages(Net):
    """What comes with the rows is normalised over the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        gain = x[:, 0]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        return (functional.cross_entropy(self(x), y, reduction="none") * gain).mean()


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


def permutation() -> pl.LightningModule:
    return Mixed("permutation")


def numpy() -> pl.LightningModule:
    return Mixed("numpy")


def python() -> pl.LightningModule:
    return Mixed("python")


def advantages() -> pl.LightningModule:
    return Advantages()


@spread(
    [
        vae,
        diffusion,
        Kept,
        Sorted,
        OwnGenerator,
        Dropped,
        Recurrent,
    ],
    seldom=[distribution, in_place, Views, Places],
)
def test_noise_is_drawn_for_all_rows_at_once(
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
    "case",
    [
        *(flip, permutation, numpy, advantages, Rescaled),
        *(pytest.param(case, marks=pytest.mark.full) for case in (roll, sort, python)),
    ],
    ids=lambda f: f.__name__,
)
def test_rows_that_are_mixed_before_the_network_are_those_of_the_whole_batch(
    ranks: Callable[[int], Ranks], case: Callable[[], pl.LightningModule], layout: str
) -> None:
    if case is Rescaled and layout == "zb_v":
        # Its network is in one checkpoint, and a head is behind that: no four stages.
        with pytest.raises(ModelError, match=r"4 stages were asked for.* has 2 units"):
            equal_to_stock(ranks, case, layout)
        return
    equal_to_stock(ranks, case, layout)


def test_what_permutes_values_of_layers_permutes_those_of_a_microbatch(
    ranks: Callable[[int], Ranks],
) -> None:
    for fitted in ranks(2).run(train, case=f"{__name__}:Hidden", strategy={"pp": 2}):
        assert fitted.metrics["pairs"] == 1.0
