"""Replicas that have not the same number of training batches: all say so, and none waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from strategies.errors import DataError
from tests.distributed.test_common_end import WIDTH, Net, strategy
from tests.ranks.fit import trainer_of

pytestmark = pytest.mark.distributed


class Some(IterableDataset[Tensor]):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        generator = torch.Generator().manual_seed(self.batches)
        for _ in range(self.batches):
            yield (torch.randn(8, WIDTH, generator=generator, dtype=torch.float64),)


class Sized(Some):
    """With a length, which may be more than there is."""

    def __init__(self, batches: int, more: int) -> None:
        super().__init__(batches)
        self.more = more

    def __len__(self) -> int:
        return self.batches + self.more


class Stateful(Sized):
    """A loader that goes on where its state says."""

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Shares(Net):
    stateful = False

    def __init__(
        self, counts: list[int], sized: bool, by_hand: bool, ends: bool, more: list[int]
    ) -> None:
        super().__init__(0)
        self.counts, self.sized, self.ends, self.more = counts, sized, ends, more
        self.automatic_optimization = not by_hand

    def train_dataloader(self) -> Any:
        stock = not hasattr(self.trainer.strategy, "dp")
        replica = 0 if stock else self.trainer.distributed_sampler_kwargs["rank"]
        count = 0 if self.ends and replica and self.current_epoch else self.counts[replica]
        if self.stateful:
            return Stateful(count, self.more[replica])
        data = Sized(count, self.more[replica]) if self.sized else Some(count)
        return DataLoader(data, batch_size=None)


class ByHand(Shares):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


def counted(
    counts: list[int], layout: dict[str, Any] | None, *, sized: bool = False,
    by_hand: bool = False, ends: bool = False, more: tuple[int, int] = (0, 0), told: bool = False,
    stateful: bool = False, **options: Any,
) -> Any:  # fmt: skip
    trainer = trainer_of(
        None if layout is None else strategy(**layout),
        **{"max_epochs": 2, "use_distributed_sampler": False} | options,
    )
    module = (ByHand if by_hand else Shares)(counts, sized, by_hand, ends, [*more])
    module.stateful = stateful
    try:
        trainer.fit(module)
    except DataError as error:
        return str(error)
    if told:
        return trainer.global_step, [float(p.detach().sum()) for p in module.parameters()]
    return trainer.global_step


BOTH = {"pp": 1, "dp": 2}


@pytest.mark.parametrize(
    ("counts", "options", "said"),
    [
        ([3, 2], {}, "replica 0 has more than 2, replica 1 has 2. "),
        ([2, 3], {}, "replica 0 has 2, replica 1 has more than 2. "),
        ([3, 2], {"sized": True}, "replica 0 has more than 2, replica 1 has 2. "),
        ([3, 2], {"by_hand": True}, "replica 0 has more than 2, replica 1 has 2. "),
        ([3, 2], {"sized": True, "more": (0, 1)}, "replica 0 has more than 2, replica 1 has 2. "),
        ([3, 2], {"sized": True, "more": (4, 1)}, "replica 0 has more than 2, replica 1 has 2. "),
        ([2, 3], {"sized": True, "more": (1, 0)}, "replica 0 has 2, replica 1 has more than 2. "),
        (
            [3, 2],
            {"stateful": True, "more": (0, 1)},
            "replica 0 has more than 2, replica 1 has 2. ",
        ),
        ([3, 2], {"accumulate_grad_batches": 2}, "replica 0 has more than 2, replica 1 has 2. "),
        ([0, 2], {}, "the data loaders have no batch"),
        (
            [2, 2],
            {"ends": True, "reload_dataloaders_every_n_epochs": 1},
            "replica 1 has 0 training batches in this epoch",
        ),
    ],
    ids=[
        "first has more",
        "second has more",
        "promised",
        "by hand",
        "second promises more",
        "both promise more",
        "first promises more",
        "a loader with a state promises more",
        "accumulated",
        "none",
        "none later",
    ],
)
def test_unequal_numbers_are_named_before_a_rank_waits(
    ranks: Any, counts: list[int], options: dict[str, Any], said: str
) -> None:
    first, second = ranks(2).run(counted, counts=counts, layout=BOTH, **options)
    assert first == second
    assert said in first


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream_2bw"])
def test_replicas_of_pipelines_say_so_as_well(ranks: Any, schedule: str) -> None:
    layout = {"pp": 2, "dp": 2, "schedule": schedule}
    found = ranks(4).run(counted, counts=[3, 2], layout=layout)
    assert len(set(found)) == 1
    assert "replica 0 has more than 2, replica 1 has 2. " in found[0]


def test_what_ends_before_the_shorter_share_is_no_matter(ranks: Any) -> None:
    assert ranks(2).run(counted, counts=[3, 2], layout=BOTH, limit_train_batches=2) == [4, 4]
    assert ranks(2).run(counted, counts=[3, 2], layout=BOTH, max_steps=2) == [2, 2]


PROMISED = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "by hand": {"by_hand": True},
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(n, marks=pytest.mark.full if n == "accumulated" else ()) for n in PROMISED],
)
def test_fewer_batches_than_all_replicas_promise_train_as_under_stock_lightning(
    ranks: Any, kind: str
) -> None:
    given = {"counts": [3, 3], "sized": True, "more": (2, 2), "told": True, **PROMISED[kind]}
    (stock,) = ranks(1).run(counted, layout=None, **given)
    for layout in ({"pp": 2}, BOTH):
        for found in ranks(2).run(counted, layout=layout, **given):
            assert found[0] == stock[0]
            assert found[1] == pytest.approx(stock[1], abs=1e-10)


def test_a_schedule_without_a_flush_ends_with_what_there_is(ranks: Any) -> None:
    layout = {"pp": 2, "schedule": "pipedream_2bw"}
    given = {"counts": [3, 3], "layout": layout, "sized": True, "told": True}
    more, exact = (ranks(2).run(counted, more=(n, n), **given) for n in (2, 0))
    assert more[0][0] == 6
    assert more[0][1] == pytest.approx(exact[0][1], abs=1e-10)


class Drawn(Sized):
    """Draws its rows from the generator from which dropout draws."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        for _ in range(self.batches):
            yield (torch.randn(8, WIDTH, dtype=torch.float64),)


class Drawing(Shares):
    def train_dataloader(self) -> Any:
        return DataLoader(Drawn(3, 1), batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0] + torch.randn_like(batch[0]),), batch_idx)


def drawn(layout: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(3)
    module = Drawing([3, 3], True, False, False, [1, 1])
    trainer = trainer_of(None if layout is None else strategy(**layout), max_epochs=2)
    trainer.fit(module)
    return [float(p.detach().sum()) for p in module.parameters()]


def test_one_pipeline_fetches_no_batch_before_stock_lightning_does(ranks: Any) -> None:
    (stock,) = ranks(1).run(drawn, layout=None)
    for found in ranks(2).run(drawn, layout={"pp": 2}):
        assert found == pytest.approx(stock, abs=1e-10)
