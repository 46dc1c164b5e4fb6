"""What a stage hands on to another one of its own rank."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.runtime.lightning.strategy import PipelineStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|num_workers).*")


class Running(nn.Module):
    """Hands on its running mean, the buffer itself, beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor, earlier: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        x = self.layer(x).tanh()
        return x if earlier is None else x * (1 + earlier), self.mean


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Running(), Running()
        self.losses: list[float] = []

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("last", self.last)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def pipeline_result(self, tensors: tuple[Tensor, ...], batch: Any, *_: Any) -> Tensor:
        return (tensors[0] - batch[0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pipeline_result(self.last(*self.first(batch[0])), batch)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def losses(**options: Any) -> list[float]:
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=PipelineStrategy(pp=1, num_microbatches=4, **options),
    )  # fmt: skip
    module = Model()
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=8))
    return module.losses


def test_a_buffer_arrives_as_it_was_though_all_microbatches_have_changed_it_since() -> None:
    found = losses(schedule="looped_bfs", stages_per_rank=2)
    assert len(found) == 3
    assert found == pytest.approx(losses(), rel=1e-6)
