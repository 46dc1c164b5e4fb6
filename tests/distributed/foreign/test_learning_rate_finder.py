"""Lightning's search for a learning rate: the same losses, and the module as it was before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.tuner import Tuner

from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks.comparison import LAYOUTS, MICROBATCHES, Net, examples
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Tuned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def find(*, strategy: dict[str, Any] | None, replicas: int = 1) -> dict[str, Any]:
    """What the search has seen and chosen, and what a training behind it comes to."""
    module = Tuned()
    if strategy is not None:
        strategy = {"num_microbatches": MICROBATCHES, **strategy}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            strategy,
            max_epochs=1,
            gradient_clip_val=0.8,
            default_root_dir=folder,
            num_sanity_val_steps=0,
        )
        data = examples(rows=64, replicas=replicas)
        finder = Tuner(trainer).lr_find(
            module, data, num_training=6, min_lr=1e-3, max_lr=3.0, early_stop_threshold=None
        )
        assert finder is not None
        trainer.fit(module, data)
        if isinstance(trainer.strategy, PipelineStrategy):
            trainer.strategy.engine.close()
    return {
        "losses": finder.results["loss"],
        "rates": finder.results["lr"],
        "rate": module.lr,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
    }


@pytest.mark.parametrize(
    "layout",
    ["zb_v", *(pytest.param(n, marks=pytest.mark.full) for n in ("1f1b", "1f1b-dp2", "zb_v-dp2"))],
)
@pytest.mark.lightning_feature("callback", "LearningRateFinder")
def test_the_search_for_a_rate_sees_what_stock_lightning_sees(
    ranks: Callable[[int], Ranks], layout: str
) -> None:
    """A late update that clipping changes is made before the search looks at the loss."""
    strategy = LAYOUTS[layout]
    replicas = strategy.get("dp", 1)
    (stock,) = ranks(1).run(find, strategy=None, replicas=replicas)
    for found in ranks(2 * replicas).run(find, strategy=strategy):
        assert found["rates"] == stock["rates"]
        assert found["losses"] == pytest.approx(stock["losses"], abs=1e-10)
        assert found["rate"] == stock["rate"]
        for name, value in found["weights"].items():
            assert torch.allclose(value, stock["weights"][name], rtol=0, atol=1e-10), name
