"""What is computed between a step's backward and its update."""

from __future__ import annotations

from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from strategies import PipelineStrategy
from strategies.runtime.update.flush import Flush

STEPS = 3
LIMIT = 0.05

pytestmark = pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|num_workers).*")


class _Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Halved(pl.Callback):
    """Changes gradients between the flush and the clipping."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            parameter.grad.data.mul_(0.5)


class _HalvedBehindTheBackward(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad.data.mul_(0.5)


def fit(strategy, callbacks):
    model = _Line()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, max_steps=STEPS,
        gradient_clip_val=LIMIT, callbacks=callbacks, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = torch.randn(4 * STEPS, 2, generator=torch.Generator().manual_seed(1))
    norms = 0
    compute = Flush._local_squared_norm

    def counted(*args, **options):
        nonlocal norms
        norms += 1
        return compute(*args, **options)

    with mock.patch.object(Flush, "_local_squared_norm", counted):
        trainer.fit(model, DataLoader(rows, batch_size=4))
    return [parameter.detach() for parameter in model.parameters()], norms


@pytest.mark.parametrize(
    ("callbacks", "per_step"), [([], 1), ([_Halved], 2), ([_HalvedBehindTheBackward], 2)]
)
def test_clipping_takes_the_norm_of_the_flush_unless_hooks_may_change_gradients(
    callbacks, per_step
):
    stock, _ = fit("auto", [kind() for kind in callbacks])
    own, norms = fit(PipelineStrategy(pp=1, num_microbatches=1), [kind() for kind in callbacks])
    for expected, found in zip(stock, own, strict=True):
        torch.testing.assert_close(found, expected)
    assert norms == per_step * STEPS
