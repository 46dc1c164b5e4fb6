"""Steps that leave layers out, or choose them, at random: as under stock Lightning."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.ranks.comparison import LAYOUTS, Net, equal_to_stock, spread, train
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class LayerDrop(Net):
    """Each layer is left out for one batch in five."""

    def drops(self) -> Any:
        return torch.rand([]) < 0.2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = batch[0]
        for layer in self.net:
            if not self.drops():
                hidden = layer(hidden)
        return cross_entropy(self.head(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class ByItem(LayerDrop):
    def drops(self) -> Any:
        return torch.rand(1).item() < 0.2


class ByPython(LayerDrop):
    def on_fit_start(self) -> None:
        random.seed(3)

    def drops(self) -> Any:
        return random.random() < 0.2


class ByNumpy(LayerDrop):
    def on_fit_start(self) -> None:
        np.random.seed(3)

    def drops(self) -> Any:
        return np.random.uniform() < 0.2


class ByOwnGenerator(LayerDrop):
    def __init__(self) -> None:
        super().__init__()
        self.drawn_from = torch.Generator().manual_seed(3)

    def drops(self) -> Any:
        return bool(torch.rand(1, generator=self.drawn_from) < 0.2)


class Chosen(LayerDrop):
    """Two or more of four blocks, by their numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = batch[0]
        for block in sorted(torch.randperm(4)[:3].tolist()):
            hidden = self.net[2 * block : 2 * block + 2](hidden)
        return cross_entropy(self.head(hidden), batch[1])


class LossNowAndThen(LayerDrop):
    """A second loss for half of the batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        loss = cross_entropy(self.head(hidden), batch[1])
        if torch.rand(1) < 0.5:
            loss = loss + hidden.pow(2).mean()
            self.log("second", loss)
        return loss


class NoiseAndDrop(LayerDrop):
    """What is drawn for rows stands among what is drawn for ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden: Tensor = batch[0] + 0.1 * torch.randn_like(batch[0])
        for layer in self.net:
            if not self.drops():
                hidden = layer(hidden)
        return cross_entropy(self.head(hidden) + 0.1 * torch.randn(len(hidden), 3), batch[1])


class Counting(LayerDrop):
    """What a step counts is counted once, also where it is looked at more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = 0

    def drops(self) -> Any:
        left_out = bool(torch.rand([]) < 0.2)
        self.dropped += left_out
        return left_out


def dropped(module: Any, _: Any) -> int:
    return int(module.dropped)


CASES = [
    LayerDrop,
    ByItem,
    ByPython,
    Chosen,
    NoiseAndDrop,
]


# A generator is a generator: of numpy's and a module's own, the rows of any day are ByPython's.
@spread(CASES, seldom=[ByNumpy, ByOwnGenerator, LossNowAndThen])
def test_layers_are_left_out_as_under_stock_lightning(
    ranks: Ranks, case: type[Net], layout: str
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2)


@spread([Counting])
def test_what_a_step_counts_is_counted_once(ranks: Ranks, case: type[Net], layout: str) -> None:
    stock, piped = equal_to_stock(ranks, case, layout, told=dropped, max_epochs=2)
    assert stock.told > 0
    assert {fitted.told for fitted in piped} == {stock.told}


@spread([LayerDrop], seldom=[ByPython])
def test_also_where_forwards_run_again(ranks: Ranks, case: type[Net], layout: str) -> None:
    strategy = {"recompute": "full"}
    equal_to_stock(ranks, case, layout, max_epochs=2, strategy=strategy)


class Unseeded(ByPython):
    """Nobody has seeded Python's generator, which stands somewhere else in each process."""

    def on_fit_start(self) -> None:
        random.seed(os.getpid())


def test_ranks_whose_numbers_differ_go_the_same_way(ranks: Any) -> None:
    first, second = ranks(2).run(
        train, case=f"{__name__}:Unseeded", strategy=LAYOUTS["1f1b"], max_epochs=3
    )
    assert first.metrics == second.metrics
    assert all(torch.equal(first.weights[n], second.weights[n]) for n in first.weights)
    assert not torch.equal(first.weights["net.0.weight"], Unseeded().net[0].weight.double())
