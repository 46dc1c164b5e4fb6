"""Losses that compare rows with each other: one of the whole batch, as stock Lightning has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.foreign.comparison import (
    EVERY_LAYOUT,
    WIDTH,
    Net,
    equal_to_stock,
    examples,
    train,
)
from tests.distributed.pool import Ranks

pytestmark = pytest.mark.distributed
WHOLE = {"loss_over": "batch"}


def all_rows(module: Any, z: Tensor) -> Tensor:
    """Of all replicas, one behind the other; gradients go back to them."""
    return module.all_gather(z, sync_grads=True).reshape(-1, z.shape[-1])  # type: ignore[no-any-return]


def info_nce(first: Tensor, second: Tensor, scale: Tensor | float = 2.0) -> Tensor:
    """Each row against all rows of the other view; its own one is the right answer."""
    first, second = nn.functional.normalize(first), nn.functional.normalize(second)
    similar = scale * first @ second.T
    answer = torch.arange(len(similar))
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(similar, answer) + cross_entropy(similar.T, answer)) / 2


class SimCLR(Net):
    """Two views of each row run at once: first all first ones, then all second ones."""

    def views(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.roll(1, 1)])

    def apart(self, z: Tensor) -> Any:
        return z.chunk(2)

    def loss(self, batch: Any) -> Tensor:
        first, second = self.apart(self(self.views(batch[0])))
        return info_nce(all_rows(self, first), all_rows(self, second))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class Neighbours(SimCLR):
    """A row's two views stand together."""

    def views(self, x: Tensor) -> Tensor:
        return torch.stack([x, x.roll(1, 1)], 1).flatten(0, 1)

    def apart(self, z: Tensor) -> Any:
        return z.unflatten(0, (-1, 2)).unbind(1)


class Towers(Net):
    """As CLIP: two towers, of which the first one's features wait, and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images = nn.functional.normalize(self(batch[0]))
        texts = nn.functional.normalize(self.text(batch[0].flip(1)))
        loss = info_nce(all_rows(self, images), all_rows(self, texts), self.scale.exp())
        self.log("scale", self.scale.detach())
        return loss


class Sequences(Net):
    """Time comes first between the layers; hard negatives of the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.stack([batch[0], batch[0].roll(2, 1), batch[0].roll(3, 1)])  # [time, rows, width]
        z = self(x)
        pooled = z.mean(0)
        apart = torch.cdist(all_rows(self, pooled), all_rows(self, z[0].contiguous()))
        return torch.relu(apart.diagonal() - apart.min(1).values + 1).mean()


class Cox(Net):
    """A partial likelihood: the risk set of a row is all rows that live longer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        risk = all_rows(self, self(batch[0]).sum(1, keepdim=True)).squeeze(1)
        lived = all_rows(self, batch[0][:, :1]).squeeze(1).detach()
        later = lived[None] >= lived[:, None]
        masked = risk[None].expand(len(risk), -1).masked_fill(~later, -torch.inf)
        return (masked.logsumexp(1) - risk).mean()


def simclr() -> Any:
    return SimCLR()


def neighbours() -> Any:
    return Neighbours()


def towers() -> Any:
    return Towers()


def sequences() -> Any:
    return Sequences()


def cox() -> Any:
    return Cox()


MORE = [pytest.param(case, marks=pytest.mark.full) for case in (neighbours, sequences, cox)]


@EVERY_LAYOUT
@pytest.mark.parametrize("case", [simclr, towers, *MORE])
def test_one_loss_of_the_whole_batch_is_that_of_stock_lightning(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], layout: str
) -> None:
    equal_to_stock(ranks, case, layout, strategy=WHOLE)


class Ragged(SimCLR):
    """Batches of 8 rows, one of 8 and a last one of 2, for four microbatches."""

    def loaders(self, *, replicas: int) -> Any:
        return examples(rows=26, replicas=replicas)


def ragged() -> Any:
    return Ragged()


def test_short_batches_accumulation_and_clipping_go_with_it(ranks: Callable[[int], Ranks]) -> None:
    more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    equal_to_stock(ranks, ragged, "zb_v", strategy=WHOLE, **more)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "foldx_fifo", "hanayo", "zb_h1"])
def test_other_schedules_run_all_forwards_first(
    ranks: Callable[[int], Ranks], schedule: str
) -> None:
    equal_to_stock(ranks, towers, "1f1b", strategy={**WHOLE, "schedule": schedule})


@pytest.mark.full
@pytest.mark.parametrize("more", [{"recompute": "full"}, {"split_backward": True}])
def test_passes_go_with_it(ranks: Callable[[int], Ranks], more: Any) -> None:
    equal_to_stock(ranks, towers, "1f1b-dp2", strategy={**WHOLE, **more})


@pytest.mark.full
def test_shared_optimizer_state_goes_with_it(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, towers, "zb_v-dp2", strategy={**WHOLE, "overlap": "zero1"})


class Noisy(Net):
    """What is drawn before the layers is another number in the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn_like(batch[0])
        return (self(batch[0] + noise).sum(1) - noise.sum(1)).square().mean()


class Auxiliary(Net):
    """A layer's own loss has no rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        own = hidden.square().mean()
        return nn.functional.cross_entropy(self.head(hidden), batch[1]) + own


def noisy() -> Any:
    return Noisy()


def auxiliary() -> Any:
    return Auxiliary()


@pytest.mark.parametrize(
    ("case", "schedule", "reason"),
    [
        (noisy, "1f1b", "depends on random numbers"),
        (auxiliary, "1f1b", "what mean gives is used behind the last layer and cannot be put"),
        (simclr, "dualpipe", "schedule=dualpipe holds every stage twice"),
    ],
)
def test_what_cannot_be_joined_is_refused_before_the_first_step(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], schedule: str, reason: str
) -> None:
    place = f"{__name__}:{case.__name__}"
    answers = ranks(2).run(refusal, case=place, strategy={"pp": 2, "schedule": schedule, **WHOLE})
    assert all(reason in answer for answer in answers), answers


def refusal(case: str, strategy: dict[str, Any]) -> str:
    with pytest.raises(Exception) as refused:
        train(case, strategy=strategy)
    return f"{refused.type.__name__} {refused.value}"
