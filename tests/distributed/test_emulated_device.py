"""Trainings on a device that does nothing before somebody waits: what ranks on GPUs rely on."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from strategies import PipelineStrategy
from strategies.errors import NotFiniteError
from strategies.models.state import Fetch
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.step.executor import Executor
from strategies.runtime.update.reduction import Reduction
from tests.emulated_device import trainer_on_it
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, train

pytestmark = pytest.mark.distributed

PIPELINE = Case("1f1b", pp=2, clip=0.05, backend="staged", steps=3)
REPLICAS = Case("1f1b", pp=1, dp=2, clip=0.05, backend="staged", steps=3)
COMPUTE = r"\d+[FBIW]\d+"


def _unwaited(self: Fetch) -> torch.Tensor:
    if not self._copy.is_floating_point():
        self._there.synchronize()  # Headers of messages: nonsense there is an error at once.
    return self._copy


def _unfinished(self: Reduction) -> None:
    if self._result is not None:
        self._result()


FORGETTING = {
    "copies to the host": mock.patch.object(Fetch, "tensor", _unwaited),
    "reductions": mock.patch.object(Reduction, "finish", _unfinished),
    "that it is alone": mock.patch.object(Engine, "_runs_ahead", False),
}


@contextlib.contextmanager
def _watched_lists(waits: list[int]) -> Iterator[None]:
    """Counts what the host waits for while it is at its list of instructions."""
    run = Executor.run

    def watched(self: Executor, *args: Any, **options: Any) -> Any:
        done = torch.cuda.current_stream().done_by
        before = done[threading.get_ident()]
        result = run(self, *args, **options)
        waits.append(done[threading.get_ident()] - before)
        return result

    with mock.patch.object(Executor, "run", watched):
        yield


def train_on_it(case: Case, forgetting: str | None = None) -> dict[str, Any]:
    """``train`` on an emulated device; ``waits``: pieces of work waited for during each list."""
    waits: list[int] = []
    forgets = FORGETTING[forgetting] if forgetting else contextlib.nullcontext()
    with trainer_on_it() as device, forgets, _watched_lists(waits):
        try:
            result = train(case=case)
        except NotFiniteError as error:
            return {"refused": str(error)}
    assert device.default.given > 1000
    return {**result, "waits": waits}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(PIPELINE, marks=pytest.mark.full),
        Case("zb_v", pp=2, backend="staged", steps=2),
        pytest.param(REPLICAS, marks=pytest.mark.full),
        pytest.param(
            Case("1f1b", pp=1, dp=2, overlap="zero1", backend="staged", steps=3),
            marks=pytest.mark.full,
        ),
    ],
    ids=["staged messages", "split backwards", "reductions", "shards"],
)
def test_losses_and_weights_are_the_hosts(ranks: Callable[[int], Ranks], case: Case) -> None:
    host = ranks(2).run(train, case=replace(case, backend="gloo"))
    device = ranks(2).run(train_on_it, case=case)
    # On the host the module is whole again; on the device each rank keeps its part.
    assert set().union(*(found["parameters"] for found in device)) == set(host[0]["parameters"])
    for expected, found in zip(host, device, strict=True):
        # A matrix product's last digit goes by where the processor finds its numbers; what nobody
        # has waited for is NaN, or of the step before.
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-13)
        for name, value in found["parameters"].items():
            torch.testing.assert_close(value, expected["parameters"][name], rtol=1e-13, atol=1e-15)
        if case.pp == 1:
            # Alone, a host is through its list before it looks at anything that the device has
            # done. (The first pass looks at what the modules change.)
            assert sum(found["waits"][1:]) == 0
        # The recorder's stamps are read from the device's clock, which is a million seconds off.
        rows = zip(found["program"], found["start"], found["end"], strict=True)
        stamps = [(start, end) for item, start, end in rows if re.fullmatch(COMPUTE, item)]
        assert len(stamps) >= 2 * case.microbatches
        for start, end in stamps:
            assert 0.0 <= start <= end < 3600.0
        assert stamps == sorted(stamps)


@pytest.mark.parametrize(
    ("forgetting", "case"), [("copies to the host", PIPELINE), ("reductions", REPLICAS)]
)
def test_a_wait_that_is_missing_shows(
    ranks: Callable[[int], Ranks], forgetting: str, case: Case
) -> None:
    for found in ranks(2).run(train_on_it, case=case, forgetting=forgetting):
        assert " is nan" in found["refused"]


@pytest.mark.full
def test_a_host_that_asks_on_the_way_is_seen_waiting(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(train_on_it, case=REPLICAS, forgetting="that it is alone"):
        assert all(found["waits"])


def backend_of_auto(gpus: list[str]) -> str:
    """What ``auto`` takes for ranks that see one of these GPUs each, as ``cuda:0``."""
    own = SimpleNamespace(uuid=gpus[int(os.environ["RANK"])])
    with trainer_on_it(), mock.patch.object(torch.cuda, "get_device_properties", lambda _: own):
        strategy = PipelineStrategy(pp=2, num_microbatches=2, backend="auto", timeout_s=60)
        pl.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False)
        strategy.setup_environment()
        return strategy.backend


def test_auto_goes_through_a_gpus_memory_only_where_ranks_share_it(
    ranks: Callable[[int], Ranks],
) -> None:
    assert ranks(2).run(backend_of_auto, gpus=["GPU-a", "GPU-b"]) == ["nccl", "nccl"]
    assert ranks(2).run(backend_of_auto, gpus=["GPU-a", "GPU-a"]) == ["shared", "shared"]
