"""Weights of which each rank has a share, as people's code sees them outside of their layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.utils.data import DataLoader

from tests.ranks.comparison import equal_to_stock
from tests.ranks.expert_training import HIDDEN, ExpertCase, ExpertModel
from tests.ranks.pool import Ranks
from tests.ranks.training import Sentences

pytestmark = pytest.mark.distributed


class Mixed(ExpertModel):
    """Experts in each block; its hooks look at them."""

    def __init__(self) -> None:
        super().__init__(ExpertCase())

    def loaders(self, *, replicas: int) -> DataLoader[Any]:
        return DataLoader(Sentences(16), batch_size=4 * replicas)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch["tokens"]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(loss, batch["targets"].flatten())

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        return torch.nn.functional.cross_entropy(
            tensors[0].flatten(0, 1), batch["targets"].flatten()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ClippedExperts(Mixed):
    """A constraint on each stack, own clipping, norms, and a forward of the whole."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        stack = self.blocks[1][1].stacks["up"]
        stack.grad.div_(stack.grad.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            up = self.blocks[0][1].stacks["up"]
            up.div_(up.norm())
            self.blocks[2][1].stacks["down"][-1].zero_()
            self.log(
                "of_blocks", self.blocks[1](torch.ones(1, 2, HIDDEN, dtype=torch.float64)).sum()
            )
        self.log("norm", torch.stack([p.norm() for p in self.parameters()]).norm())


def ema() -> list[pl.Callback]:
    return [EMAWeightAveraging(decay=0.8)]


EXPERTS: dict[str, dict[str, Any]] = {
    "dp2-ep2": {"dp": 2, "ep": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "dp2-tp2-ep2-sliced": {"dp": 2, "tp": 2, "ep": 2, "expert_tp": True},
    "tp2-sliced": {"tp": 2, "expert_tp": True},
}


@pytest.mark.parametrize(
    "layout",
    [n if n == "dp2-ep2" else pytest.param(n, marks=pytest.mark.full) for n in EXPERTS],
)
def test_a_hook_sees_all_experts(layout: str, ranks: Callable[[int], Ranks]) -> None:
    given = {"num_microbatches": 2, "seed": 0, "tp": 1, **EXPERTS[layout]}
    equal_to_stock(ranks, ClippedExperts, "tp2", strategy=given, callbacks=ema)
