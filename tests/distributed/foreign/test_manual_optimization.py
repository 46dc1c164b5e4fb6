"""Modules with ``automatic_optimization = False``: GANs, several losses, steps by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.foreign.comparison import EVERY_LAYOUT, WIDTH, Net, equal_to_stock
from tests.distributed.pool import Ranks

pytestmark = pytest.mark.distributed


class Manual(Net):
    """One optimizer, stepped by hand, and its schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rate", optimizer.param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


class Gan(Net):
    """Lightning's example: two networks, toggled, each with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        del self.net, self.head
        torch.manual_seed(0)
        self.generator = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(WIDTH, 1),
            nn.Sigmoid(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)  # type: ignore[no-any-return]

    def adversarial_loss(self, answer: Tensor, truth: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(answer, truth)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        g, d = self.optimizers()
        z = torch.sin(3 * images).type_as(images)
        valid = torch.ones(images.size(0), 1).type_as(images)
        self.toggle_optimizer(g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        g.zero_grad()
        self.manual_backward(g_loss)
        g.step()
        self.untoggle_optimizer(g)
        self.toggle_optimizer(d)
        real_loss = self.adversarial_loss(self.discriminator(images), valid)
        fake = torch.zeros(images.size(0), 1).type_as(images)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        d.zero_grad()
        self.manual_backward(d_loss)
        d.step()
        self.untoggle_optimizer(d)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        real = self.discriminator(batch[0]).mean()
        self.log("val_real", real)
        self.log("val_fake", self.discriminator(self(batch[0])).mean() - real)

    def configure_optimizers(self) -> Any:
        g = torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=0.02, betas=(0.5, 0.999))
        return [g, d], []


class Accumulating(Manual):
    """A step for every second batch, clipped; two losses over one body, one after the other."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        features = self.net(x)
        first = nn.functional.cross_entropy(self.head(features), y)
        second = features.pow(2).mean()
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(0.1 * second)
        if (batch_idx + 1) % 2 == 0:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log("first", first)
        self.log("second", second)
        return {"loss": first}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class DiscriminatorFirst(Gan):
    """The other order, no toggles, the generator in every second batch only."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        g, d = self.optimizers()
        valid = torch.ones(images.size(0), 1).type_as(images)
        self.fake = self(torch.sin(3 * images))
        d_loss = self.adversarial_loss(self.discriminator(images), valid)
        d_loss = d_loss + self.adversarial_loss(self.discriminator(self.fake.detach()), 0 * valid)
        d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(d, gradient_clip_val=0.1, gradient_clip_algorithm="value")
        d.step()
        self.log("d_loss", d_loss)
        if batch_idx % 2 == 1:
            g_loss = self.adversarial_loss(self.discriminator(self.fake), valid)
            g.zero_grad()
            self.manual_backward(g_loss)
            self.clip_gradients(g, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            g.step()
            self.log("g_loss", g_loss)


class ActorCritic(Net):
    """A shared body, two heads with an optimizer each; values of one are data for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.value = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        actor, critic = self.optimizers()
        features = self.net(x)
        values = self.value(features).squeeze(-1)
        critic_loss = (values - y).pow(2).mean()
        advantage = (y - values).detach()
        chances = torch.log_softmax(self.head(features), -1).gather(1, y[:, None]).squeeze(-1)
        actor_loss = -(advantage * chances).mean()
        actor.zero_grad()
        critic.zero_grad()
        self.manual_backward(critic_loss, retain_graph=True)
        self.manual_backward(actor_loss)
        actor.step()
        critic.step()
        self.log_dict({"actor": actor_loss, "critic": critic_loss})

    def configure_optimizers(self) -> Any:
        body = [*self.net.parameters(), *self.head.parameters()]
        return torch.optim.Adam(body, lr=0.01), torch.optim.SGD(self.value.parameters(), lr=0.1)


class Closures(Gan):
    """Steps with closures inside ``toggle_model``, as Lightning's docstring has them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        g, d = self.optimizers()
        valid = torch.ones(images.size(0), 1).type_as(images)
        last = batch_idx % 2 == 1

        def close_g() -> None:
            loss = self.adversarial_loss(self.discriminator(self(images)), valid)
            g.zero_grad()
            self.manual_backward(loss)
            self.log("g_loss", loss)

        with g.toggle_model(sync_grad=last):
            g.step(closure=close_g)

        def close_d() -> None:
            loss = self.adversarial_loss(self.discriminator(images), valid)
            loss = loss - self.discriminator(self(images).detach()).mean()
            d.zero_grad()
            self.manual_backward(loss)
            self.log("d_loss", loss)

        with d.toggle_model(sync_grad=last):
            d.step(closure=close_d)


CASES = [Manual, Gan, Accumulating, DiscriminatorFirst, ActorCritic, Closures]


@EVERY_LAYOUT
@pytest.mark.parametrize("case", CASES)
def test_manual_optimization_is_equal_to_stock_lightning(
    case: Callable[[], Any], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, piped = equal_to_stock(ranks, case, layout, told=steps, max_epochs=2)
    assert stock.told
    assert stock.logged
    for fitted in piped:
        assert fitted.told == stock.told
    assert piped[0].logged == [pytest.approx(row, abs=1e-10) for row in stock.logged]


def steps(module: Any, trainer: Any) -> int:
    return int(trainer.global_step)
