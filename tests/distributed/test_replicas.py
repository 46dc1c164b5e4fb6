"""Replicas that are not alike, and ranks with other optimizers, are found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from strategies.errors import PipelineError
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks
from tests.ranks.training import Learner, Sentences, small_shape

pytestmark = pytest.mark.distributed


class _Meddler(pl.Callback):
    """Changes one weight of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if dist.get_rank() == self._rank and trainer.global_step == 1:
            weight = next(iter(trainer.strategy.engine.named_parameters().values()))
            with torch.no_grad():
                weight.view(-1)[0] += 1e-3


class _Hasty(pl.Callback):
    """Changes a rate of one rank, as a callback does that acts on one rank, or of all."""

    reads_weights = False

    def __init__(self, rank: int | None) -> None:
        self._rank = rank

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._rank in (None, dist.get_rank()) and trainer.global_step == 1:
            for group in trainer.strategy.optimizers[0].param_groups:
                group["lr"] *= 2


class _Odd(Learner):
    """Rank 1 has another optimizer, or other groups."""

    kind = "none"

    def configure_optimizers(self) -> Any:
        odd = dist.get_rank() == 1
        parameters: list[Tensor] = list(self.parameters())
        if self.kind == "class" and odd:
            return torch.optim.SGD(parameters, lr=0.1)
        if self.kind == "rate":
            return torch.optim.Adam(parameters, lr=0.2 if odd else 0.1)
        if self.kind == "group":
            groups = [{"params": parameters, "weight_decay": 0.5 if odd else 0.0}]
            return torch.optim.Adam(groups, lr=0.1)
        if self.kind == "count" and odd:
            halves = [{"params": parameters[:1]}, {"params": parameters[1:]}]
            return torch.optim.Adam(halves, lr=0.1)
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        if self.kind == "schedule":
            steps = torch.optim.lr_scheduler.StepLR(optimizer, 3 if odd else 2)
            warm = torch.optim.lr_scheduler.LinearLR(optimizer)
            both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, steps], [4])
            return [optimizer], [both]
        return optimizer


def _fit(
    folder: str, pp: int, dp: int, meddler: int | None, kind: str, overlap: str = "grad_reduce"
) -> tuple[str, int]:
    strategy = {
        "pp": pp, "dp": dp, "num_microbatches": 4, "timeout_s": 20, "seed": 0, "overlap": overlap,
    }  # fmt: skip
    callbacks = [] if meddler is None else [_Meddler(meddler)]
    trainer: Any = trainer_of(strategy, max_steps=2, callbacks=callbacks)
    if kind.startswith("hasty"):
        trainer.callbacks.append(_Hasty(1 if kind == "hasty" else None))
    module = _Odd(small_shape())
    module.kind = kind
    try:
        trainer.fit(module, DataLoader(Sentences(64), batch_size=8))
        if kind == "late" and trainer.global_rank == 1:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.2
        trainer.save_checkpoint(Path(folder) / "end.ckpt")
    except PipelineError as error:
        return f"{type(error).__name__}: {error}", trainer.global_step
    return "no error", trainer.global_step


def test_replicas_that_differ_are_named_before_a_checkpoint_is_written(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    answers = ranks(2).run(_fit, folder=str(tmp_path), pp=1, dp=2, meddler=1, kind="none")
    assert {steps for _, steps in answers} == {2}
    (message,) = {message for message, _ in answers}
    assert message.startswith(
        "CheckpointError: no checkpoint was written: replicas differ: rank 1 (replica 1, pipeline "
        "rank 0, tp rank 0) has other weights than rank 0 (replica 0): "
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overlap", ["grad_reduce", "zero1"])
def test_replicas_that_are_alike_are_kept(
    overlap: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    answers = ranks(2).run(
        _fit, folder=str(tmp_path), pp=1, dp=2, meddler=None, kind="none", overlap=overlap
    )
    assert answers == [("no error", 2)] * 2
    assert (tmp_path / "end.ckpt").exists()


@pytest.mark.parametrize(
    ("kind", "pp", "what"),
    [
        ("class", 2, "optimizers: Adam on rank 0, SGD on rank 1"),
        ("rate", 2, "lr of optimizer 0: 0.1 on rank 0, 0.2 on rank 1"),
        ("schedule", 2, "_schedulers.1.step_size of scheduler 0: 2 on rank 0, 3 on rank 1"),
        ("group", 1, "group 0 of optimizer 0 on pipeline rank 0: "),
        ("count", 1, "group 0 of optimizer 0 on pipeline rank 0: "),
    ],
)
def test_ranks_with_other_optimizers_are_refused(
    kind: str, pp: int, what: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    answers = ranks(2).run(_fit, folder=str(tmp_path), pp=pp, dp=2 // pp, meddler=None, kind=kind)
    (message,) = {message for message, _ in answers}
    assert message.startswith("MismatchError: the ranks do not have the same optimizers, so noth")
    assert what in message
    assert {steps for _, steps in answers} == {0}


@pytest.mark.parametrize(
    ("pp", "overlap"),
    [
        (2, "grad_reduce"),
        pytest.param(1, "grad_reduce", marks=pytest.mark.full),
        (1, "zero1"),
    ],
    ids=str,
)
def test_a_rate_that_one_rank_has_changed_is_named_before_a_checkpoint_is_written(
    pp: int, overlap: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"folder": str(tmp_path), "pp": pp, "dp": 2 // pp, "meddler": None}
    for kind, begins in (
        ("hasty", "MismatchError: "),
        ("late", "CheckpointError: no checkpoint was written: "),
    ):
        answers = ranks(2).run(_fit, **given, kind=kind, overlap=overlap)
        (message,) = {message for message, _ in answers}
        assert message.startswith(
            f"{begins}the ranks' optimizers differ: "
            "lr of group 0 of optimizer 0: 0.1 on rank 0, 0.2 on rank 1. "
        )
    assert list(tmp_path.iterdir()) == []
    answers = ranks(2).run(_fit, **given, kind="hasty everywhere", overlap=overlap)
    assert answers == [("no error", 2)] * 2
