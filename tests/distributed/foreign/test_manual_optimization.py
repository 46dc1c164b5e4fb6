"""Modules with ``automatic_optimization = False``: GANs, several losses, steps by hand."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Accuracy

from strategies.errors import ModelError
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.distributed.foreign.test_rows_told import told
from tests.ranks.comparison import (
    CLASSES,
    WIDTH,
    Fitted,
    Net,
    equal_to_stock,
    examples,
    spread,
    train,
)
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks

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


class Looking(Manual):
    """Forwards on both sides of the step, a number, a counter, a rate that is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = self.loss(batch) * self.seen
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        with torch.no_grad():
            before = self.loss(batch)
        optimizer.step()
        with torch.no_grad():
            after = self.loss(batch)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        self.log("gain", before - after)
        self.log("loss", loss.item() / self.seen)
        self.log("rate", optimizer.param_groups[0]["lr"])


class Cycle(Net):
    """Two generators that feed each other share a stage; the discriminators have others."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        del self.net, self.head
        torch.manual_seed(0)
        self.to_b, self.to_a, self.is_a, self.is_b = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(True), nn.Linear(WIDTH, width))
            for width in (WIDTH, WIDTH, 1, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        a = batch[0]
        b = torch.sin(a)
        g, d = self.optimizers()
        fake_b, fake_a = self.to_b(a), self.to_a(b)
        with self.toggled_optimizer(g):
            cycled = (self.to_a(fake_b) - a).abs().mean() + (self.to_b(fake_a) - b).abs().mean()
            g_loss = cycled + self.is_a(fake_a).pow(2).mean() + self.is_b(fake_b).pow(2).mean()
            self.manual_backward(g_loss)
            g.step()
            g.zero_grad()
        with self.toggled_optimizer(d):
            real = (self.is_a(a) - 1).pow(2).mean() + (self.is_b(b) - 1).pow(2).mean()
            fake = self.is_a(fake_a.detach()).pow(2).mean()
            d_loss = real + fake + self.is_b(fake_b.detach()).pow(2).mean()
            self.manual_backward(d_loss)
            d.step()
            d.zero_grad()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})

    def configure_optimizers(self) -> Any:
        makers = [*self.to_b.parameters(), *self.to_a.parameters()]
        judges = [*self.is_a.parameters(), *self.is_b.parameters()]
        return [torch.optim.Adam(makers, lr=0.01), torch.optim.Adam(judges, lr=0.01)]


class Teacher(Manual):
    """BYOL's kind of loop: a momentum teacher that follows at the end of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(torch.cos(batch[0]))
        return super().loss(batch) + (self.net(batch[0]) - target).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for q, p in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)


@spread(
    [Manual, Gan, Accumulating, Looking],
    seldom=[DiscriminatorFirst, ActorCritic, Closures, Cycle, Teacher],
)
def test_manual_optimization_is_equal_to_stock_lightning(
    case: Callable[[], Any], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, piped = equal_to_stock(ranks, case, layout, told=steps, max_epochs=2)
    for fitted in piped:
        assert fitted.told == stock.told
    assert stock.logged
    assert piped[0].logged == [pytest.approx(row, abs=1e-10) for row in stock.logged]


def steps(module: Any, trainer: Any) -> int:
    return int(trainer.global_step)


class Noise(Gan):
    """Lightning's example as it stands: the noise is drawn in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z = torch.randn(batch[0].shape[0], WIDTH).type_as(batch[0])
        super().training_step([z, batch[1]], batch_idx)


class NoiseTwice(Gan):
    """Noise of its own for each half, smoothed labels, and real and fake rows in one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        g, d = self.optimizers()
        loss = nn.functional.binary_cross_entropy
        truth = torch.ones(len(images), 1).type_as(images)
        fake = self(torch.randn_like(images))
        g_loss = loss(self.discriminator(fake), truth)
        g.zero_grad()
        self.manual_backward(g_loss)
        g.step()
        fake = self(torch.randn_like(images)).detach()
        answer = self.discriminator(torch.cat([images, fake]))
        truth = truth - 0.1 * torch.rand_like(truth)
        d_loss = loss(answer, torch.cat([truth, torch.zeros_like(truth)]))
        d.zero_grad()
        self.manual_backward(d_loss)
        d.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})


class Advantages(Manual):
    """As PPO does: what comes with the rows is normalised over the batch."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        gain = x[:, 0]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        found = torch.distributions.Categorical(logits=self(x)).log_prob(y)
        return -(found * gain).mean()


class Flipped(Manual):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x - 0.2 * x.flip(0)), y)


class Normalised(Manual):
    """The same of what a layer gives, which no microbatch can do."""

    def loss(self, batch: Any) -> Tensor:
        z = self(batch[0])
        return nn.functional.cross_entropy((z - z.mean(0)) / (z.std(0) + 1e-6), batch[1])


class Contrastive(Manual):
    def loss(self, batch: Any) -> Tensor:
        z = nn.functional.normalize(self(batch[0]))
        alike = z @ z.T
        return (torch.logsumexp(alike, 1) - alike.diagonal()).mean()


class MixedInside(Manual):
    def loss(self, batch: Any) -> Tensor:
        hidden = self.net(batch[0])
        return nn.functional.cross_entropy(self.head(hidden + hidden.flip(0)), batch[1])


class Summed(Manual):
    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")


@spread([Noise, NoiseTwice])
def test_noise_is_drawn_for_all_rows_at_once(
    case: Any, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Normalised, "is no mean over rows"),
        (Advantages, "is no mean over rows"),
        pytest.param(Flipped, "mixes rows .*on_after_batch_transfer", marks=pytest.mark.full),
        pytest.param(Contrastive, "is no mean over rows", marks=pytest.mark.full),
        (Summed, "is no mean over rows"),
        (MixedInside, "mixes rows of the batch between its layers"),
    ],
)
def test_losses_that_microbatches_cannot_share_are_refused_before_the_first_step(
    case: Any, words: str, ranks: Callable[[int], Ranks]
) -> None:
    name = f"{__name__}:{case.__name__}"
    for refusal in ranks(2).refusals(train, case=name, strategy={"pp": 2}):
        assert isinstance(refusal, ModelError)
        assert re.search(f"(?s){words}.*num_microbatches=1", str(refusal))


class Drawing(Gan):
    """Random numbers in the step and in its layers."""

    def __init__(self) -> None:
        super().__init__()
        random.seed(0)
        np.random.seed(0)
        self.generator.insert(2, nn.Dropout(0.3))
        self.generator.insert(3, nn.BatchNorm1d(WIDTH))  # called in both halves of the step
        self.discriminator.insert(2, nn.Dropout(0.3))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise = torch.randn(batch[0].shape).type_as(batch[0]) + random.random()
        noise += torch.from_numpy(np.random.randn(*noise.shape))
        super().training_step([nn.functional.dropout(noise, 0.1), batch[1]], batch_idx)


def drawn(**strategy: Any) -> Fitted:
    return train(f"{__name__}:Drawing", strategy=strategy)


@pytest.mark.parametrize("schedule", ["zb_v", pytest.param("dualpipe_v", marks=pytest.mark.full)])
def test_random_numbers_do_not_depend_on_the_cut(
    schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    (alone,) = ranks(1).run(drawn, pp=1)
    for fitted in ranks(2).run(drawn, pp=2, schedule=schedule):
        assert fitted.metrics == pytest.approx(alone.metrics, abs=1e-9)
        for name, value in fitted.weights.items():
            assert torch.allclose(value, alone.weights[name], rtol=0, atol=1e-9), name


class Listing(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.manual_backward(loss)


class Baseline(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.baseline = torch.zeros((), dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.baseline = 0.9 * self.baseline + 0.1 * loss.detach()
        self.manual_backward(loss)


class Deciding(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        if loss.item() < 3:
            self.optimizers().step()


class Norms(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Clamping(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)


class Detached(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch).detach())


class Freezing(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.head.requires_grad_(False)
        self.manual_backward(self.loss(batch))


class Counting(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.right = Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.right(out, batch[1])
        self.manual_backward(nn.functional.cross_entropy(out, batch[1]))


class Scheduling(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.lr_schedulers().step(loss)


class Packing(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        hidden, lengths = self.net(batch[0])[:, None], torch.ones(len(batch[0]))
        packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths, batch_first=True)
        self.manual_backward(nn.functional.cross_entropy(self.head(packed.data), batch[1]))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Listing, "changes self.losses in place"),
        (Counting, "updates the metric self.right"),
        (Baseline, "uses self.baseline of the batch before"),
        (Deciding, "may be logged or printed, but not decide"),
        (Norms, "reads .grad of a parameter"),
        (Clamping, "changes a parameter inside"),
        (Detached, "no gradient flows"),
        (Freezing, "sets requires_grad of parameters"),
        (Packing, "packs sequences, and uses manual"),
        (Scheduling, "by a value that only one stage has"),
    ],
)
def test_what_cannot_be_once_per_batch_is_refused_before_the_first_step(
    case: type[Manual], message: str, ranks: Callable[[int], Ranks]
) -> None:
    name = f"{__name__}:{case.__name__}"
    for refusal in ranks(2).refusals(train, case=name, strategy={"pp": 2}):
        assert isinstance(refusal, ModelError) and message in str(refusal)


@pytest.mark.parametrize("case", [Baseline, Norms, Deciding])
def test_with_one_stage_they_run_whole(case: Any, ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, case, "1f1b", strategy={"pp": 1})


@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec|logging interval|validation_step).*")
@pytest.mark.parametrize(
    ("options", "trainer", "message"),
    [
        ({"recompute": "full"}, {}, "cannot run again"),
        ({"overlap": "zero1"}, {}, "gathers weights under the next step"),
        ({}, {"precision": "bf16-true"}, "second copy of the weights"),
    ],
)
def test_what_does_not_go_with_several_passes_is_refused(
    options: dict[str, Any], trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        train(f"{__name__}:Manual", strategy={"pp": 1, **options}, **trainer)


def validated_first() -> int:
    trainer: Any = trainer_of({"pp": 2, "num_microbatches": 4}, max_epochs=1)
    module = Gan()
    trainer.validate(module, examples(), verbose=False)
    trainer.fit(module, examples(), examples())
    trainer.strategy.engine.close()
    return int(trainer.global_step)


def test_a_module_may_be_validated_before_it_is_trained(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(validated_first) == [8, 8]


class Tells(Manual):
    """Logs what is no mean, and returns more than its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("mean", logits.mean())
        self.log("spread", logits.detach().std())
        return {"loss": loss.detach(), "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = float(outputs["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_hooks_and_logs_do_not_get_is_said(ranks: Callable[[int], Ranks]) -> None:
    case = f"{__name__}:Tells"
    first, second = ranks(2).run(told, case=case, strategy={"pp": 2, "schedule": "1f1b"})
    assert all("logs spread, no mean" in line and "mean," not in line for line in first)
    assert len(first) == 1
    assert any("returns logits" in line for line in (*first, *second))


class Leaves(Tells):
    """Keeps a value of a step for a hook, which was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.latest = torch.tensor(0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.latest = result["loss"]
        return result

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = float(self.latest)


def test_what_a_step_has_left_is_no_number_of_the_batch(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(ModelError, match="latest was left by a step with manual"):
        equal_to_stock(ranks, Leaves, "1f1b")


def num_steps_of_many_batches() -> tuple[int, bool]:
    """Trains 500 batches of eight microbatches by hand on this rank."""
    enter = torch.inference_mode.__enter__
    strategy = PipelineStrategy(pp=2, schedule="1f1b", num_microbatches=8, timeout_s=60)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision="64-true",
        max_steps=500,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Manual(), examples(rows=400))
    strategy.engine.close()
    return trainer.global_step, torch.inference_mode.__enter__ is enter


@pytest.mark.full
def test_hundreds_of_batches_leave_nothing_behind(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(num_steps_of_many_batches, deadline_s=600) == [(500, True)] * 2
