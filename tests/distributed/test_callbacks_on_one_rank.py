"""A callback that one rank alone has: training ends as with it on all ranks, or is refused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from strategies.errors import PipelineError
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks.fit import QUIET
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

ROWS = 8


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        return {"loss": loss, "size": loss.detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Units(Net):
    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [(f"net.{i}", unit) for i, unit in enumerate(self.net)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        return functional.mse_loss(tensors[0], batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.mse_loss(self.net(batch[0]), batch[1])


class Before(Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        """May change gradients."""


class Behind(Callback):
    def on_after_backward(self, *_: Any) -> None:
        """May read gradients."""


class Ends(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        """May read weights, and what a step has returned."""


def _loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 24, 6, generator=generator).unbind()
    return DataLoader(TensorDataset(x, y), batch_size=ROWS)


CASES: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    "hooks of a cut module": (Net, {"pp": 2}, {}),
    "replicas": (Net, {"pp": 1, "dp": 2}, {}),
    "sharded weights": (Units, {"pp": 1, "dp": 2, "overlap": "zero1"}, {}),
    "updates before their verdict": (
        Units, {"pp": 2, "schedule": "zb_h2", "post_validation": True}, {"gradient_clip_val": 0.1},
    ),
    "no flush": (
        Units, {"pp": 2, "schedule": "pipedream_2bw", "num_microbatches": 2},
        {"gradient_clip_val": 0.1},
    ),
}  # fmt: skip


_DAILY = ["hooks of a cut module", "replicas"]


def fit(cases: list[str], *, alone: bool | None) -> dict[str, Any]:
    """The weights of each case; ``alone``: whether rank 0 alone has callbacks, None if no rank."""
    warnings.filterwarnings("ignore", ".*(post_validation=true|may look at weights).*")
    found = {}
    for case in cases:
        kind, request, options = CASES[case]
        strategy = PipelineStrategy(**{"num_microbatches": 4, "timeout_s": 20} | request)
        has = alone is not None and (os.environ["RANK"] == "0" or not alone)
        trainer = pl.Trainer(
            **QUIET,
            **options,
            strategy=strategy,
            max_epochs=1,
            callbacks=[Before(), Behind(), Ends()] if has else [],
        )
        module = kind()
        trainer.fit(module, _loader())
        found[case] = {n: p.detach().clone() for n, p in module.named_parameters()}
        strategy.engine.close()
    return found


@pytest.mark.parametrize(
    "cases",
    [_DAILY, pytest.param([c for c in CASES if c not in _DAILY], marks=pytest.mark.full)],
    ids=["daily", "all others"],
)
def test_hooks_on_one_rank_alone_train_as_on_all(
    cases: list[str], ranks: Callable[[int], Ranks]
) -> None:
    everywhere = ranks(2).run(fit, cases=cases, alone=False)
    one = ranks(2).run(fit, cases=cases, alone=True)
    for case in cases:
        for rank in (0, 1):
            for name, value in everywhere[rank][case].items():
                assert torch.equal(one[rank][case][name], value), f"{case}: {name} on {rank}"


def refused(kind: str, folder: str) -> str:
    callback = {
        "EarlyStopping": lambda: EarlyStopping("loss"),
        "ModelCheckpoint": lambda: ModelCheckpoint(folder, every_n_train_steps=2),
    }[kind]
    strategy = PipelineStrategy(pp=2, num_microbatches=4, timeout_s=20)
    trainer = pl.Trainer(
        **QUIET | {"enable_checkpointing": True},
        strategy=strategy,
        max_epochs=1,
        callbacks=[callback()] if os.environ["RANK"] == "0" else [],
    )
    try:
        trainer.fit(Net(), _loader())
    except PipelineError as error:
        return str(error)
    finally:
        strategy.engine.close()
    return "trained"


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("EarlyStopping", "EarlyStopping, ModelCheckpoint on rank 0, ModelCheckpoint on rank 1"),
        ("ModelCheckpoint", "'every_n_train_steps': 2"),
    ],
)
def test_what_stops_or_saves_has_to_be_on_all_ranks(
    kind: str, shown: str, ranks: Callable[[int], Ranks], tmp_path: Any
) -> None:
    for message in ranks(2).run(refused, kind=kind, folder=str(tmp_path)):
        assert message.startswith("the ranks do not have the same callbacks, so nothing was")
        assert shown in message
