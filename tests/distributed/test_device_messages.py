"""Ranks that share a GPU exchange tensors in its memory, on an emulated one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.runtime.messages import device_transport
from strategies.runtime.messages.device_transport import DeviceTransport
from tests.device_messages import FORGETTING, shared_gpu, talk
from tests.emulated_device import CUDA, trainer_on_it
from tests.emulated_ipc import emulated_ipc
from tests.ranks.fit import fit
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, Sentences, reference, small_shape, train

pytestmark = pytest.mark.distributed

SIZES = (1, 2**21, 2**21 + 1, 5 * 2**20)


def test_what_comes_is_what_was_sent_and_blocks_are_used_again(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for rank, found in enumerate(ranks(2).run(talk, folder=str(tmp_path), sizes=SIZES)):
        assert found["near"] == [1 - rank]
        assert found["wrong"] == []
        # Three at once of each room, 2, 4 and 6 MiB; a turn later the same again.
        assert found["blocks"] == [9]
        assert found["messages"] > 9
        assert found["left"] == 0


@pytest.mark.parametrize("forgetting", list(FORGETTING))
def test_a_wait_that_is_missing_shows(
    ranks: Callable[[int], Ranks], tmp_path: Path, forgetting: str
) -> None:
    found = ranks(2).run(talk, folder=str(tmp_path), sizes=(1000, 3000), forgetting=forgetting)
    assert all(each["wrong"] for each in found)


def open_transport(
    folder: str,
    uuids: tuple[str, str] = ("GPU-0", "GPU-0"),
    sharing: tuple[bool, bool] = (True, True),
) -> dict[str, Any]:
    """Whom it reaches in device memory, whether messages come, and what is said."""
    own, said = dist.get_rank(), []
    log = mock.patch.object(device_transport._log, "warning", lambda *words: said.append(words))
    with shared_gpu(folder, uuid=uuids[own], shares=sharing[own]) as memory, log:
        transport = DeviceTransport(dist.group.WORLD, CUDA, timeout_s=60.0)
        sent = torch.arange(1000.0, device=CUDA) + own
        handle = transport.send(sent, 1 - own, 3)
        came = transport.expect((1000,), torch.float32, CUDA, 1 - own, 3).wait()
        right = torch.equal(came.cpu(), torch.arange(1000.0) + 1 - own)
        handle.wait()
        transport.drain()
        transport.close()
        assert memory is not None
        left = len(memory.made) + len(memory.mapped)
    return {"near": sorted(transport._near), "right": right, "said": said, "left": left}


@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("they use different GPUs", {"uuids": ("GPU-0", "GPU-1")}),
        ("CUDA_ERROR_NOT_SUPPORTED", {"sharing": (False, False)}),
        ("CUDA_ERROR_NOT_SUPPORTED", {"sharing": (True, False)}),
    ],
    ids=["two GPUs", "no handles", "no handles at one end"],
)
def test_ranks_that_cannot_share_agree_and_go_through_host_memory(
    ranks: Callable[[int], Ranks], tmp_path: Path, why: str, options: dict[str, Any]
) -> None:
    first, second = ranks(2).run(open_transport, folder=str(tmp_path), **options)
    for found in (first, second):
        assert found["near"] == []
        assert found["right"]
    assert [why in words[1] for words in first["said"]] == [True]
    assert second["said"] == []


def test_ranks_that_share_say_nothing(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for rank, found in enumerate(ranks(2).run(open_transport, folder=str(tmp_path))):
        assert found == {"near": [1 - rank], "right": True, "said": [], "left": 0}


def leave_early(folder: str) -> list[str]:
    """Rank 1 goes without a word; rank 0 waits for a message, and for its last reader."""
    if dist.get_rank() == 1:
        with shared_gpu(folder):
            transport = DeviceTransport(dist.group.WORLD, CUDA, timeout_s=60.0)
            for channel in transport._near.values():
                channel.unmap()
                channel._words._link.shutdown(2)
        return []
    with shared_gpu(folder):
        transport = DeviceTransport(dist.group.WORLD, CUDA, timeout_s=60.0)
        (channel,) = transport._near.values()
        said = []
        try:
            channel.take(5, (3,), torch.float32, CUDA)
        except RuntimeError as error:
            said.append(str(error))
        transport.drain()
        transport.close()
    return said


def test_nothing_hangs_where_a_rank_has_gone(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    said, _ = ranks(2).run(leave_early, folder=str(tmp_path))
    assert len(said) == 1
    assert "Connection closed by peer" in said[0]


# ---------------------------------------------------------------------------------------- training

SHAPE = small_shape(layers=2, hidden=16, heads=4, kv_heads=4, ffn=12)
CASES = {
    "1f1b": Case("1f1b", pp=2, clip=0.05, steps=3),
    "split backwards": Case("zb_v", pp=2, steps=3, short_last=True),
    "interleaved": Case("interleaved_1f1b", pp=2, steps=2, accumulation=2),
    "replicas": Case("foldx_fifo", pp=2, dp=2, steps=3),
    "sliced": Case("1f1b", pp=2, tp=2, steps=2, shape=SHAPE),
}
EVERY_DAY = ("1f1b",)


def train_sharing(case: Case, folder: str) -> dict[str, Any]:
    opened: list[DeviceTransport] = []
    begin = DeviceTransport.__init__

    def noted(self: DeviceTransport, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        opened.append(self)

    with (
        trainer_on_it(),
        emulated_ipc(Path(folder)) as memory,
        mock.patch.object(DeviceTransport, "__init__", noted),
    ):
        result = train(case=case)
        left = len(memory.made) + len(memory.mapped)
    return {**result, "near": [sorted(each._near) for each in opened], "left": left}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in EVERY_DAY else pytest.mark.full)
        for name, case in CASES.items()
    ],
)
def test_losses_and_weights_are_those_of_gloo(
    ranks: Callable[[int], Ranks], tmp_path: Path, case: Case
) -> None:
    size = case.pp * case.dp * case.tp
    gloo = ranks(size).run(train, case=replace(case, backend="gloo"))
    shared = ranks(size).run(
        train_sharing, case=replace(case, backend="shared", whole=False), folder=str(tmp_path)
    )
    for expected, found in zip(gloo, shared, strict=True):
        assert found["near"] == [[1 - found["pp_rank"]]]
        assert found["left"] == 0
        assert found["bytes_sent"] == expected["bytes_sent"]
        # A matrix product's last digit goes by where the processor finds its numbers.
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-13)
        for name, value in found["parameters"].items():
            torch.testing.assert_close(value, expected["parameters"][name], rtol=1e-13, atol=1e-15)


def train_and_validate(case: Case, folder: str) -> list[float]:
    with trainer_on_it(), emulated_ipc(Path(folder)):
        loader = DataLoader(Sentences(8), batch_size=8)
        return train(case=case, val_dataloaders=loader, num_sanity_val_steps=1)["losses"]


@pytest.mark.full
def test_blocks_of_an_evaluation_serve_in_training(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = replace(CASES["1f1b"], backend="shared", whole=False)
    losses, _ = reference(case)
    for found in ranks(2).run(train_and_validate, case=case, folder=str(tmp_path)):
        assert found == pytest.approx(losses, rel=1e-10)


class Counting(nn.Module):
    """Hands on how many samples it has seen, in host memory as torch's packed sequences want it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if count is not None:
            assert count.device.type == "cpu"
            x = x * int(count)
        return self.layer(x), torch.tensor([len(x)])


class Counted(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counting() for _ in range(2))
        self.losses: list[float] = []

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [(f"layers.{place}", layer) for place, layer in enumerate(self.layers)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def pipeline_result(
        self, tensors: tuple[Tensor, ...], batch: Any, batch_idx: int, mode: str
    ) -> Tensor:
        return tensors[0].square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("a pipeline runs its units")

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def count(folder: str | None, backend: str) -> list[float]:
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(trainer_on_it())
            stack.enter_context(emulated_ipc(Path(folder)))
        module = Counted()
        loader = DataLoader(TensorDataset(torch.arange(64.0).view(16, 4)), batch_size=4)
        strategy = {
            "pp": 2, "num_microbatches": 2, "backend": backend,
            "whole_after": False if folder else "auto",
        }  # fmt: skip
        with fit(module, loader, strategy=strategy, max_steps=2, precision="32-true"):
            pass
    return module.losses


@pytest.mark.parametrize("backend", ["staged", "shared"])
def test_a_tensor_in_host_memory_arrives_there(
    ranks: Callable[[int], Ranks], tmp_path: Path, backend: str
) -> None:
    expected = ranks(2).run(count, folder=None, backend="gloo")
    found = ranks(2).run(count, folder=str(tmp_path), backend=backend)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
