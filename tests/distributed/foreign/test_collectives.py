"""Steps that talk to other processes: in a pipeline, to the replicas, as under data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn

from strategies.errors import ModelError
from tests.ranks.comparison import (
    EVERY_LAYOUT,
    Net,
    equal_to_stock,
    train,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Gathered(Net):
    """The mean over all replicas' rows, once with and once without gradients of the others'."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(batch[0])
        others = self.all_gather(z, sync_grads=True).reshape(-1, z.shape[-1])
        rows = self.all_gather(batch[1]).reshape(-1)
        self.log("rows", float(len(rows)) / len(z) / self.trainer.world_size)
        loss = nn.functional.cross_entropy(others, rows)
        self.log("loss", loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        everyone = self.all_gather(torch.ones(3))
        assert everyone.numel() == 3 * getattr(self.trainer.strategy, "dp", 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self.all_gather(self(batch[0]))
        assert not z.requires_grad
        self.log("val", z.square().mean(), sync_dist=True)


def gathered() -> Any:
    return Gathered()


@EVERY_LAYOUT
def test_all_gather_is_over_replicas_in_steps(ranks: Callable[[int], Ranks], layout: str) -> None:
    equal_to_stock(ranks, gathered, layout)


class _Synced(torch.autograd.Function):
    """As in lightning-bolts: gathers forwards, adds gradients up backwards."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = len(tensor)
        everyone = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensor)
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        whole = gradient.clone()
        dist.all_reduce(whole)
        start = dist.get_rank() * ctx.rows
        return whole[start : start + ctx.rows]


class Mirrored(Net):
    """Rows are each other's negatives: which rows lie where does not matter."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(batch[0])
        everyone, rank = z, 0
        if dist.is_available() and dist.is_initialized():
            everyone, rank = _Synced.apply(z), dist.get_rank()
            assert self.trainer.world_size == dist.get_world_size() == len(everyone) // len(z)
            assert self.global_rank == rank == self.trainer.strategy.coordinates.dp_rank
        similar = nn.functional.normalize(z) @ nn.functional.normalize(everyone).T
        return nn.functional.cross_entropy(similar, torch.arange(len(z)) + rank * len(z))


def mirrored() -> Any:
    return Mirrored()


@EVERY_LAYOUT
def test_direct_collectives_are_over_replicas(ranks: Callable[[int], Ranks], layout: str) -> None:
    equal_to_stock(ranks, mirrored, layout, strategy={"num_microbatches": 1})


class Between(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(x)
        mean = hidden.mean(0)
        dist.all_reduce(mean)
        return self.head(hidden - mean)  # type: ignore[no-any-return]


class Elsewhere(Net):
    """Over a group that was made before anybody knew of stages."""

    def setup(self, stage: str) -> None:
        self.everyone = dist.group.WORLD

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        dist.all_reduce(loss.detach(), group=self.everyone)
        return loss


def between() -> Any:
    return Between()


def elsewhere() -> Any:
    return Elsewhere()


@pytest.mark.parametrize(
    ("case", "reason"),
    [(between, "all_reduce is called on a value between layers"), (elsewhere, "group of its own")],
)
def test_what_would_hang_is_refused_before_the_first_step(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], reason: str
) -> None:
    place = f"{__name__}:{case.__name__}"
    answers = ranks(2).run(refusal, case=place, strategy={"pp": 2, "schedule": "1f1b"})
    assert all(reason in answer for answer in answers), answers


def refusal(case: str, strategy: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as refused:
        train(case, strategy=strategy)
    return str(refused.value)


class Counted(Net):
    """As people count over an epoch under data parallelism."""

    def on_train_epoch_end(self) -> None:
        rows = torch.tensor(8.0)
        dist.all_reduce(rows)


class Longest(Net):
    """What comes to the same over all processes."""

    def on_train_epoch_end(self) -> None:
        rows = torch.tensor(8.0)
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
        self.log("longest", rows, sync_dist=True)
        self.log("rows", self.trainer.strategy.reduce(rows, reduce_op="sum"), sync_dist=True)


def test_hooks_that_would_count_a_replica_per_stage_are_refused(
    ranks: Callable[[int], Ranks],
) -> None:
    words = "Counted.on_train_epoch_end calls torch.distributed.all_reduce over all 2 processes"
    for refusal in ranks(2).refusals(train, case=f"{__name__}:Counted", strategy={"pp": 2}):
        assert isinstance(refusal, ModelError)
        assert words in str(refusal)
    for fitted in ranks(2).run(train, case=f"{__name__}:Longest", strategy={"pp": 2}):
        assert fitted.metrics == {"longest": 8.0, "rows": 8.0}
