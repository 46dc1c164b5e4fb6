"""A stage may hand on a buffer that each microbatch changes: all get what it held for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.runtime.messages import transport
from tests.ranks.fit import fit
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

WIDTH, MICROBATCHES, STEPS = 512, 4, 3


class Running(nn.Module):
    """Hands on a running mean beside its output, the buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, earlier: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        x = self.layer(x).tanh()
        return x if earlier is None else x * (1 + earlier), self.mean


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Running() for _ in range(4))

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [(f"layers.{place}", layer) for place, layer in enumerate(self.layers)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def pipeline_result(
        self, tensors: tuple[Tensor, ...], batch: Any, batch_idx: int, mode: str
    ) -> Tensor:
        return (tensors[0] - batch[0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tensors = self.pipeline_inputs(batch)
        for layer in self.layers:
            tensors = layer(*tensors)
        return self.pipeline_result(tensors, batch, batch_idx, "train")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Losses(pl.Callback):
    reads_weights = False

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.values.append(float(outputs["loss"]))


def losses_with(**options: Any) -> list[float]:
    rows = torch.randn(STEPS * 256, WIDTH, generator=torch.Generator().manual_seed(3))
    losses = Losses()
    loader = DataLoader(TensorDataset(rows), batch_size=256)
    strategy = {"num_microbatches": MICROBATCHES, **options}
    given = {"max_steps": STEPS, "precision": "32-true", "callbacks": [losses]}
    with (
        mock.patch.object(transport, "_WORTH_A_THREAD", 0),
        fit(Model(), loader, strategy=strategy, **given),
    ):
        return losses.values


@pytest.mark.parametrize(
    ("schedule", "backend"),
    [
        ("interleaved_1f1b", "gloo"),
        ("1f1b", "shared"),
        ("zb_v", "shared"),
        pytest.param("1f1b", "gloo", marks=pytest.mark.full),
        pytest.param("zb_v", "gloo", marks=pytest.mark.full),
        pytest.param("interleaved_1f1b", "shared", marks=pytest.mark.full),
    ],
)
def test_each_microbatch_goes_on_with_what_the_buffer_held(
    ranks: Callable[[int], Ranks], schedule: str, backend: str
) -> None:
    alone = ranks(1).run(losses_with, pp=1)[0]
    for found in ranks(2).run(losses_with, pp=2, schedule=schedule, backend=backend):
        assert found == pytest.approx(alone, rel=1e-6)
