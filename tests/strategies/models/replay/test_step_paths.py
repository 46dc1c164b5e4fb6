"""Where a step's code may go one way or another."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from strategies.models.replay.unit_search import has_branches, names_read


class Straight(pl.LightningModule):
    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body or nn.Sequential(nn.Linear(2, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return [layer for layer in (self.body(batch),)]


class InStep(Straight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.body(batch) if batch_idx else batch


class InParentsStep(InStep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


class InMethod(Straight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run_body(batch)

    def run_body(self, batch: Any) -> Any:
        return batch if self.current_epoch else self.body(batch)


class InProperty(Straight):
    @property
    def factor(self) -> int:
        return 2 if self.current_epoch else 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.factor * self.body(batch)


class InForward(Straight):
    def forward(self, batch: Any) -> Any:
        return self.body(batch) if len(batch) else batch


class Counts(Straight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(self.current_epoch):
            batch = self.body(batch)
        return batch


class Picks(Straight):
    which = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.body[self.which](batch["x"][:, 1:])


class PicksAlways(Straight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.body[0](batch["x"][:, 1:])


def helper(module: Any, batch: Any) -> Any:
    return module.body(batch) if module.current_epoch else batch


class InFunction(Straight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return helper(self, batch)


class Body(nn.Sequential):
    def forward(self, input: Any) -> Any:
        return input if len(self) > 7 else super().forward(input)


class InValidation(Straight):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.body(batch) if batch_idx else batch


@pytest.mark.parametrize(
    ("module", "branches"),
    [
        (Straight(), False),
        (InStep(), True),
        (InParentsStep(), True),
        (InMethod(), True),
        (InProperty(), True),
        (InFunction(), True),
        (Straight(Body(nn.Linear(2, 2))), True),
        (InForward(), True),
        (Counts(), True),
        (Picks(), True),
        (PicksAlways(), False),
        (InValidation(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_branches_are_found_wherever_a_step_calls_layers(
    module: pl.LightningModule, branches: bool
) -> None:
    assert has_branches(module, "training_step", ["body.0"]) is branches


def test_a_unit_is_run_as_a_whole_and_may_branch_as_it_likes() -> None:
    module = Straight(nn.Sequential(Body(nn.Linear(2, 2))))
    assert not has_branches(module, "training_step", ["body.0"])
    assert has_branches(module, "training_step", ["body.0.0"])


def test_what_stands_between_units_may_choose_too() -> None:
    module = Straight(nn.Sequential(nn.Linear(2, 2), Body(nn.Tanh()), nn.Linear(2, 2)))
    assert has_branches(module, "training_step", ["body.0", "body.2"])
    assert not has_branches(module, "training_step", ["body.0", "body.1", "body.2"])


class Read(Straight):
    """Reads one number in its step, one in a method of it, and none in a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight * self.body(self.mixed(batch))

    def mixed(self, batch: Any) -> Any:
        return batch * getattr(self, "share")  # noqa: B009

    def on_train_batch_end(self, *_: Any) -> None:
        self.logged = True


def test_names_that_a_step_reads() -> None:
    read = names_read(Read(), "training_step", ["body.0"])
    assert {"weight", "share", "mixed"} <= read
    assert "logged" not in read


def test_layers_dropped_by_configuration() -> None:
    class Dropping(nn.Sequential):
        layerdrop = 0.1

    module = Straight(Dropping(nn.Linear(2, 2)))
    assert has_branches(module, "training_step", ["body.0"])
    Dropping.layerdrop = 0.0
    assert not has_branches(module, "training_step", ["body.0"])
