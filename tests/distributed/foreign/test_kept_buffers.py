"""Modules without parameters that keep something of what they see are layers, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional

from tests.ranks.comparison import WIDTH, Net, equal_to_stock
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Codebook(nn.Module):
    """Moving averages of what was nearest to each entry (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        entries = torch.sin(torch.arange(4.0 * WIDTH)).view(4, WIDTH)
        self.register_buffer("entries", entries)
        self.register_buffer("counts", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(x, self.entries).argmin(1)  # type: ignore[arg-type]
        chosen = self.entries[nearest]  # type: ignore[index]
        if self.training:
            which = functional.one_hot(nearest, 4).to(x)
            self.counts.mul_(0.9).add_(which.sum(0), alpha=0.1)  # type: ignore[operator]
            self.entries.lerp_((which.T @ x.detach()) / self.counts[:, None], 0.1)  # type: ignore[operator, index]
        return x + (chosen - x).detach(), functional.mse_loss(x, chosen.detach())


class Quantised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.book = Codebook()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, far = self.book(self.net[:4](batch[0]))
        return functional.cross_entropy(self.head(self.net[4:](hidden)), batch[1]) + 0.25 * far


class Rounded(Net):
    """Quantisation-aware training; torch's kernels for it know float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        given = {"observer": MovingAverageMinMaxObserver, "quant_min": 0, "quant_max": 255}
        self.first, self.second = (FakeQuantize(**given) for _ in range(2))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.net[:4](x).float()).to(x)
        return self.head(self.second(self.net[4:](hidden).float()).to(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", [Quantised, Rounded], ids=lambda case: case.__name__)
def test_kept_buffers_are_those_of_stock_lightning(
    ranks: Callable[[int], Ranks], case: Callable[[], Any]
) -> None:
    books = [name for name, _ in case().named_buffers()]
    strategy = {"num_microbatches": 1}
    equal_to_stock(ranks, case, "1f1b", strategy=strategy, buffers=books, max_epochs=2)
