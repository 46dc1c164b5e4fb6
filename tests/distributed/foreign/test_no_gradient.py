"""Values that a stage gives and that get no gradient: weights before the cut have none, either."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from tests.ranks.comparison import Net, equal_to_stock, spread
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Adam(Net):
    """Whose state and decay tell a gradient of zeros from none."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class DetachedBehind(Adam):
    """Only the head is trained, though nothing is frozen."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.head(self.net(batch[0]).detach()), batch[1])


class DetachedInTheMiddle(Adam):
    """Some layers before a detach, some behind it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:5](batch[0]).detach()
        return cross_entropy(self.head(self.net[5:](hidden)), batch[1])


class DetachedAtFirst(Adam):
    """Warming up the head: the rest is trained from the third batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        if self.global_step < 2:
            hidden = hidden.detach()
        return cross_entropy(self.head(hidden), batch[1])


class DetachedLater(Adam):
    """The rest is trained for two batches; its moments and its decay rest behind them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        return cross_entropy(self.head(hidden if batch_idx < 2 else hidden.detach()), batch[1])


class TwoBranches(Adam):
    """Two values cross the cut; one of them has no part in the loss' gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(8, 8)
        self.right = torch.nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        left, right = self.left(batch[0]), self.right(batch[0])
        return cross_entropy(self.head(self.net(left + right.detach())), batch[1])


class TeacherAndStudent(Adam):
    """A distillation without no_grad: the target is detached at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        target = self.teacher(batch[0])
        hidden = self.net(batch[0])
        return mse_loss(hidden, target.detach()) + cross_entropy(self.head(hidden), batch[1])


class Unused(Adam):
    """A value of the first layers that is only logged at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.gauge = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        gauge = self.gauge(batch[0])
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("gauge", gauge.detach().mean())
        return loss


class SecondHeadNowAndThen(Adam):
    """What a second head gives counts for every other batch, by an expression."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        side, hidden = self.side(batch[0]), self.net(batch[0])
        second, first = self.second(hidden + side), self.head(hidden)
        more = cross_entropy(second, batch[1]) if batch_idx % 2 == 0 else 0.0
        return cross_entropy(first, batch[1]) + more


class Valve(torch.nn.Module):
    """Stands between layers, and lets no gradient through from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return x if self.calls[0] < 2 else x.detach()


class ModuleDecides(Adam):
    """What the step's own code does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.valve = Valve()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.head(self.valve(self.net(batch[0]))), batch[1])


class ByHand(Net):
    """Two optimizers; the first one's layers have no gradient in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        hidden = self.net(batch[0])
        loss = cross_entropy(self.head(hidden.detach() if batch_idx % 2 else hidden), batch[1])
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.net.parameters(), lr=0.01, weight_decay=0.1),
            torch.optim.AdamW(self.head.parameters(), lr=0.01, weight_decay=0.1),
        ]


CASES = [
    DetachedLater,
    TwoBranches,
    TeacherAndStudent,
    Unused,
    SecondHeadNowAndThen,
]


@spread(CASES, seldom=[ModuleDecides, ByHand, DetachedBehind, DetachedInTheMiddle, DetachedAtFirst])
def test_weights_without_a_gradient_are_left_as_they_are(
    ranks: Ranks, case: type[Net], layout: str
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2)


@spread([DetachedAtFirst, DetachedInTheMiddle], name="case")
def test_also_where_batches_are_added_up(ranks: Ranks, case: type[Net], layout: str) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2, accumulate_grad_batches=2)
