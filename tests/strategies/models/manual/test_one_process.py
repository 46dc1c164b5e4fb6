"""Steps with manual optimization, cut into two stages of one process, against stock Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.errors import ModelError
from strategies.models.snapshot import Snapshot
from strategies.runtime.lightning.strategy import PipelineStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|num_workers).*")


class Manual(LightningModule):
    """Three layers, of which the one in the middle is never called, and one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.idle = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)
        self.count = 0

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(rows)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self(batch[0]).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.count += 1
        self.log("loss", loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)


class Gan(Manual):
    """Two networks whose stages are the other way round in half of the step; not always both."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makes, judges = self.optimizers()
        self.toggle_optimizer(makes)
        made = self(batch[0])
        loss = -self.judge(made).mean()
        makes.zero_grad()
        self.manual_backward(loss)
        makes.step()
        self.untoggle_optimizer(makes)
        if batch_idx % 2 == 0:
            self.toggle_optimizer(judges)
            judged = self.judge(made.detach()).square().mean()
            judges.zero_grad()
            self.manual_backward(judged)
            judges.step()
            self.untoggle_optimizer(judges)
            self.log("judged", judged)
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        own = [*self.first.parameters(), *self.second.parameters()]
        return torch.optim.Adam(own, lr=0.01), torch.optim.SGD(self.judge.parameters(), lr=0.1)


class Warmed(Manual):
    """A rate that the step sets itself, from its own counter."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.param_groups[0]["lr"] = 0.1 / (self.count + 1)
        loss = self(batch[0]).square().mean()
        optimizer.param_groups[0]["lr"] /= 2
        optimizer.zero_grad()
        self.log("rate", optimizer.param_groups[0]["lr"])
        self.manual_backward(loss)
        optimizer.step()
        self.count += 1
        self.mark = batch[1][-1]


class Tied(Manual):
    """The first layer's weights are the last one's, too."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(rows)))
        return nn.functional.linear(hidden.expand(-1, 4), self.first.weight, self.first.bias)


class Backwards(Manual):
    """Validation calls the last layer before the first one, and what training does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 3.0))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        last = self.second(batch[0] * self.scale).mean()
        self.log("val_loss", last + self.first(self.idle(batch[0])).square().mean())


class Uneven(Manual):
    """Steps its optimizer for the first microbatch alone."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self(batch[0]).square().mean())
        if of_the_first(batch):
            self.optimizers().step()


class UnevenInside(Manual):
    """Clears gradients in another way for the first microbatch, within a pass."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self(batch[0]).square().mean()
        self.optimizers().zero_grad(set_to_none=of_the_first(batch))
        self.manual_backward(loss)


class UnevenRates(Uneven):
    """Sets a rate that depends on its rows."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["lr"] = 0.2 if of_the_first(batch) else 0.1
        Manual.training_step(self, batch, batch_idx)


class Normed(Manual):
    """A layer has buffers, and the step has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.BatchNorm1d(4)
        self.register_buffer("own", torch.zeros(2))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.idle(self.first(rows))))


class Seen(Callback):
    """The model's parameters by stage, while it is cut."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.model = strategy.engine.model
        self.shares = [
            [name for name, _ in self.model.stage_parameters(stage)] for stage in range(2)
        ]
        self.shared = self.model.shared_parameters()
        self.first_stages = self.model.first_stages()


def of_the_first(batch: Any) -> bool:
    """Whether these rows begin as a batch of the loader does."""
    return bool(batch[1][0] % 4 == 0)


def fitted(module: LightningModule, strategy: Any, *callbacks: Callback) -> Trainer:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.arange(16)), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, logger=False, callbacks=[*callbacks],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    return trainer


def stages(count: int = 2) -> PipelineStrategy:
    return PipelineStrategy(
        pp=1, num_microbatches=2, schedule="interleaved_1f1b", stages_per_rank=count
    )


def numbers(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("kind", [Manual, Gan, Warmed, Tied, Backwards])
def test_two_stages_train_as_stock_lightning_does(kind: type[Manual]) -> None:
    plain, cut = kind(), kind()
    expected, found = fitted(plain, "auto"), fitted(cut, stages())
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(cut.state_dict()[name], value)
    assert cut.count == plain.count


def test_what_no_step_uses_stays_with_the_weights_before_it() -> None:
    seen = Seen()
    fitted(Manual(), stages(), seen)
    first = ["first.weight", "first.bias", "idle.weight", "idle.bias"]
    assert seen.shares == [first, ["second.weight", "second.bias"]]
    assert seen.shared == ()


def test_weights_of_two_stages_are_shared_and_begin_on_the_first() -> None:
    seen = Seen()
    fitted(Tied(), stages(), seen)
    assert seen.shared == (("first.weight", (0, 1)), ("first.bias", (0, 1)))
    assert seen.shares[0] == ["first.weight", "first.bias", "idle.weight", "idle.bias"]
    assert seen.first_stages["first.weight"] == 0
    assert seen.first_stages["second.weight"] == 1


def test_ways_through_a_step_are_numbered_and_kinds_are_those_of_what_else_it_does() -> None:
    seen = Seen()
    fitted(Gan(), stages(), seen)
    ways = [layout for (mode, _), layout in seen.model._layouts.items() if mode == "train"]
    assert [seen.model.number_of(layout) for layout in ways] == [0, 1]
    kinds = []
    for number in range(40):  # Every batch does something else besides its layers.
        seen.model._others = frozenset({f"operation {number}"})
        kinds.append(seen.model.kind_of(ways[1]))
    # So many are told apart; from then on it is the first of the same way.
    assert kinds == [*range(2, 32), *[1] * 10]
    seen.model._others = frozenset({"operation 1"})
    assert seen.model.kind_of(ways[1]) == kinds[1]


@pytest.mark.parametrize("kind", [Uneven, UnevenInside])
def test_a_step_that_differs_by_microbatch_is_refused(kind: type[Manual]) -> None:
    with pytest.raises(ModelError, match="does not do the same for every microbatch"):
        fitted(kind(), stages())


def test_attributes_are_those_of_the_last_microbatch() -> None:
    module = Warmed()
    fitted(module, stages())
    assert module.mark == 15


def test_a_later_batch_copies_no_buffers_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[list[str]] = []
    take = Snapshot.take

    def note(self: Snapshot) -> Snapshot:
        found = take(self)
        copied[-1] += [kept.ref.name for kept in found._tensors]
        return found

    class Batches(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            copied.append([])

    copied.append([])
    monkeypatch.setattr(Snapshot, "take", note)
    fitted(Normed(), stages(), Batches())
    assert "idle.running_mean" in copied[0]  # of the probe
    assert set(copied[3]) == {"own"}


def test_rates_that_differ_by_microbatch_are_refused() -> None:
    with pytest.raises(ModelError, match="other learning rates for one microbatch"):
        fitted(UnevenRates(), stages())
