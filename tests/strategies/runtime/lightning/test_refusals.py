"""What a pipeline refuses of optimizers and callbacks, by what they do on small parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import SGD

from strategies.errors import ModelError
from strategies.plan import Plan
from strategies.runtime.lightning.refusals import refuse_module, refuse_optimizers


class Separate(SGD):
    """Of somebody's own, and no different."""


class Noisy(SGD):
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return found


class OneNorm(SGD):
    """Each gradient over the norm of all."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            own = [p for group in self.param_groups for p in group["params"]]
            norm = torch.stack([p.grad.norm() for p in own]).norm()
            for parameter in own:
                parameter.sub_(parameter.grad / norm, alpha=0.1)
        return found


def check(kind: type[SGD], pipeline: int = 2) -> None:
    made = kind(nn.Linear(2, 2).parameters(), lr=0.1)
    refuse_optimizers([made], world_size=pipeline, pipeline=pipeline, on_nan="stop")


def test_an_optimizer_that_treats_each_parameter_by_itself_is_taken() -> None:
    check(Separate)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Noisy, "draws random numbers"), (OneNorm, "by the gradients of others, too")],
)
def test_an_optimizer_that_ranks_would_not_run_alike_is_refused(
    kind: type[SGD], reason: str
) -> None:
    check(kind, pipeline=1)
    with pytest.raises(ModelError, match=f"the optimizer {kind.__name__} .*{reason}"):
        check(kind)


class Normed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)


def test_running_statistics_are_refused_where_stages_are_held_twice_and_only_there() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    refuse_module(trainer, Normed(), Plan("1f1b", 2, 4), shared=False)
    with pytest.raises(ModelError, match=r"^norm keeps running statistics; schedule=chimera"):
        refuse_module(trainer, Normed(), Plan("chimera", 2, 4), shared=False)
