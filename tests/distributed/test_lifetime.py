"""A process may train many times: what a strategy took is given back with it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.distributed.pool import Ranks
from tests.distributed.training import Learner, Sentences, small_shape

pytestmark = pytest.mark.distributed


def _fit(strategy: PipelineStrategy, model: Learner, *, times: int = 1) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=0,
    )
    for epoch in range(times):
        trainer.fit_loop.max_epochs = epoch + 1
        trainer.fit(model, DataLoader(Sentences(16), batch_size=8))


def what_is_left(schedule: str, times: int, mixed: bool) -> list[tuple[int, int, bool]]:
    """(threads of Python, open files, engine gone) after each of several trainings.

    With ``mixed`` groups pass for such of NCCL and gloo, which are given back otherwise.
    """
    mixture = mock.patch.object(dist, "get_backend", lambda _=None: "cpu:gloo,cuda:nccl")
    with mixture if mixed else contextlib.nullcontext():
        return [_left(schedule) for _ in range(times)]


def _left(schedule: str) -> tuple[int, int, bool]:
    strategy = PipelineStrategy(pp=2, schedule=schedule, num_microbatches=4, timeout_s=60)
    _fit(strategy, Learner(small_shape()))
    engine = weakref.ref(strategy.engine)
    del strategy
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


def weights_after_fits(times: int) -> dict[str, torch.Tensor]:
    """The same Trainer fits again: hooks were taken off in between and are back."""
    strategy = PipelineStrategy(pp=2, num_microbatches=4, timeout_s=60)
    model = Learner(small_shape(), "SGD")
    _fit(strategy, model, times=times)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_a_trainer_that_fits_twice_trains_twice(ranks: Callable[[int], Ranks]) -> None:
    once = ranks(2).run(weights_after_fits, times=1)
    twice = ranks(2).run(weights_after_fits, times=2)
    for first, second in zip(once, twice, strict=True):
        assert all(not torch.equal(first[name], second[name]) for name in first)
