"""A process may train many times: what a strategy took is given back with it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks.pool import Ranks
from tests.ranks.training import Learner, Sentences, small_shape

pytestmark = pytest.mark.distributed


def _fit(
    strategy: PipelineStrategy | None,
    model: Learner,
    *,
    times: int = 1,
    rows: int = 8,
    **options: Any,
) -> Iterator[None]:
    """Fits one epoch after the other, and stops behind each."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if strategy is None else "auto",
        strategy=strategy or "auto",
        **options,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=0,
    )
    for epoch in range(times):
        trainer.fit_loop.max_epochs = epoch + 1
        trainer.fit(model, DataLoader(Sentences(16), batch_size=rows))
        yield


def what_is_left(schedule: str, times: int, mixed: bool) -> list[tuple[int, int, bool]]:
    """(threads of Python, open files, engine gone) after each of several trainings.

    With ``mixed`` groups pass for such of NCCL and gloo, which are given back otherwise.
    """
    mixture = mock.patch.object(dist, "get_backend", lambda _=None: "cpu:gloo,cuda:nccl")
    with mixture if mixed else contextlib.nullcontext():
        return [_left(schedule) for _ in range(times)]


def _left(schedule: str) -> tuple[int, int, bool]:
    strategy = PipelineStrategy(pp=2, schedule=schedule, num_microbatches=4, timeout_s=60)
    model = Learner(small_shape())
    for _ in _fit(strategy, model):
        pass
    engine = weakref.ref(strategy.engine)
    del strategy, model
    gc.collect()
    # The message thread ends by itself once nobody can give it a message.
    for thread in threading.enumerate():
        if thread.name == "messages":
            thread.join(10)
    files = len(list(Path("/proc/self/fd").iterdir()))
    return threading.active_count(), files, engine() is None


@pytest.mark.parametrize("mixed", [False, True], ids=["gloo", "nccl beside gloo"])
def test_nothing_is_left_of_a_training(ranks: Callable[[int], Ranks], mixed: bool) -> None:
    for found in ranks(2).run(what_is_left, schedule="1f1b", times=3, mixed=mixed):
        assert all(gone for _, _, gone in found)
        assert found[0] == found[1] == found[2]


def fit_again(layout: tuple[int, int] | None) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights after two ``fit`` of one Trainer, and the hooks on them after each.

    Without a layout stock Lightning on one device.
    """
    pp, dp = layout or (1, 1)
    strategy = None if layout is None else PipelineStrategy(pp=pp, dp=dp, num_microbatches=4)
    model = Learner(small_shape(), "SGD")
    hooks = []
    for _ in _fit(strategy, model, times=2, rows=16 // dp, precision="64-true"):
        found = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
        hooks.append(sum(found))
    return {name: value.detach().clone() for name, value in model.named_parameters()}, hooks


@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec|logging interval|val_dataloader).*")
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["pp2", "dp2"])
def test_a_trainer_that_fits_twice_trains_as_stock_lightning_does(
    layout: tuple[int, int], ranks: Callable[[int], Ranks]
) -> None:
    stock, _ = fit_again(None)
    for weights, hooks in ranks(2).run(fit_again, layout=layout):
        assert hooks == [0, 0]
        assert len(weights) == len(stock)
        for name, value in weights.items():
            torch.testing.assert_close(value, stock[name], atol=1e-10, rtol=0)
