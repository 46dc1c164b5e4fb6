"""NCCL between ranks that share one GPU: every kind of group and message, against plain torch.

NCCL refuses two ranks of one host on one GPU. NCCL_HOSTID makes each rank a host of its own, and
their messages go through sockets. That is slow, since the GPU runs one process at a time, so cases
are small: three steps, few reductions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.test_expert_parallel import compare_built_in
from tests.distributed.test_mixture import MOE
from tests.distributed.test_parity import compare
from tests.distributed.test_precision import data
from tests.distributed.test_tensor_parallel import compare as compare_shared
from tests.distributed.test_training_details import Units
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape, train

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

# A case takes seconds; one that hangs must leave time for the others.
DEADLINE_S = 40.0
FIRST_DEADLINE_S = 90.0  # with the imports of the ranks and their first use of the GPU
MOST_HUNG = 2

# Read by NCCL when it makes a process's first communicator.
_VARIABLES = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    # Each communicator else takes about 100 MB of the GPU, and there are a hundred of them.
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_MAX_P2P_NCHANNELS": "1",
}


def share_the_gpu() -> None:
    """Makes this rank a host of its own for NCCL; its later work goes by NCCL or not, as asked."""
    os.environ.update(_VARIABLES, NCCL_HOSTID=f"rank{os.environ['RANK']}")


def add_up() -> list[float]:
    """A sum of all ranks, and a message from each to the next, by NCCL without anything of ours."""
    share_the_gpu()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    total = torch.full((1000,), float(rank + 1), device="cuda")
    dist.all_reduce(total, group=group)
    pair = dist.new_group(backend="nccl")
    passed = torch.full((1000,), float(rank), device="cuda")
    if rank == 0:
        dist.send(passed, group=pair, group_dst=1)
    elif rank == 1:
        dist.recv(passed, group=pair, group_src=0)
    found = [float(total.unique()), float(passed.unique())]
    for made in (pair, group):
        dist.destroy_process_group(made)
    assert size > 1
    return found


def train_by_nccl(case: Case) -> dict[str, Any]:
    share_the_gpu()
    return train(case)


SHARED = small_shape(layers=2, hidden=16, heads=4, kv_heads=4, tie_embeddings=True)
EXPERTS = small_shape(layers=2, moe=MOE)
FEW = 0.02  # MB of a bucket: five or so per stage
CASES = {
    "1f1b": Case("1f1b", pp=2),
    "four ranks": Case("1f1b", pp=4),
    "both ways": Case("zb_v", pp=2),
    "copies of a stage": Case("chimera", pp=2, buckets_mb=FEW),
    "fold, clipped": Case("foldx_fifo", pp=2, dp=2, clip=0.05, buckets_mb=FEW),
    "no overlap": Case("1f1b", pp=2, dp=2, overlap="none", buckets_mb=FEW),
    "shares": Case("1f1b", pp=2, dp=2, overlap="zero1", clip=0.05, buckets_mb=FEW),
    "shared matrices": Case("1f1b", tp=2, microbatches=2, shape=SHARED),
    "sequence parallel": Case("1f1b", pp=2, tp=2, microbatches=2, sequence_parallel=True,
                              shape=SHARED, clip=0.05),
    "experts": Case("1f1b", pp=2, dp=2, ep=2, microbatches=2, rows=4, shape=EXPERTS,
                    buckets_mb=FEW),
}  # fmt: skip


def on_nccl(case: Case) -> Case:
    return replace(case, steps=3, backend="nccl", accelerator="gpu")


def hold(case: Case, results: list[dict[str, Any]]) -> None:
    """Against plain torch, in double precision."""
    if case.ep > 1:
        compare_built_in(case, results)
    elif case.tp > 1:
        compare_shared(case, results)
    else:
        compare(case, results)


@dataclass
class Patience:
    """Runs functions on ranks until too many have hung."""

    ranks: Callable[[int], Ranks]
    hung: int = 0

    def run(self, world_size: int, function: Callable[..., Any], **given: Any) -> list[Any]:
        if self.hung >= MOST_HUNG:
            pytest.skip(f"{self.hung} tests of NCCL have hung already")
        world = self.ranks(world_size)
        try:
            return world.run(function, **{"deadline_s": DEADLINE_S, **given})
        except AssertionError as error:
            self.hung += "did not answer" in str(error)
            raise


@pytest.fixture(scope="module")
def patience(ranks: Callable[[int], Ranks]) -> Patience:
    return Patience(ranks)


@pytest.mark.parametrize("world_size", [2, 4])
def test_nccl_itself_works_between_ranks_that_share_a_gpu(
    world_size: int, patience: Patience
) -> None:
    found = patience.run(world_size, add_up, deadline_s=FIRST_DEADLINE_S)
    total = world_size * (world_size + 1) / 2
    assert [entry[0] for entry in found] == [total] * world_size
    assert [entry[1] for entry in found] == [0.0, 0.0, 2.0, 3.0][:world_size]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_by_nccl_equals_plain_torch(case: Case, patience: Patience) -> None:
    case = on_nccl(case)
    hold(case, patience.run(case.pp * case.dp * case.tp, train_by_nccl, case=case))


# ------------------------------------------------------------------------ short integers on the way


class Marked(nn.Module):
    """Hands a mark per row on beside its output, in a type that NCCL does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)) * marks.unsqueeze(-1), 3 - marks


class Markings(Units):
    def make(self) -> nn.Module:
        return Marked()

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return batch[0], (batch[0][:, 0] > 0).to(torch.int16) + 1

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        loss = functional.mse_loss(tensors[0], batch[1])
        self.log("train_loss", loss)
        return loss


def train_marked(pp: int, backend: str, accelerator: str) -> dict[str, Tensor]:
    """This rank's weights after two steps."""
    if backend == "nccl":
        share_the_gpu()
    strategy = {
        "pp": pp,
        "dp": 1,  # "auto" would want a GPU per rank
        "num_microbatches": 2,
        "backend": backend,
        "whole_after": False,
    }
    trainer: Any = trainer_of(
        strategy, accelerator=accelerator, limit_val_batches=0, max_epochs=1, precision="32-true"
    )
    trainer.fit(Markings(), data())
    strategy = trainer.strategy
    if pp > 1:
        assert "torch.int16" in {
            str(dtype) for spec in strategy.engine.mailbox._specs.values() for dtype in spec.dtypes
        }
    owned = strategy.engine.named_parameters()
    found = {name: parameter.detach().cpu().clone() for name, parameter in owned.items()}
    strategy.engine.close()
    return found


def hold_marked(alone: dict[str, Tensor], results: list[dict[str, Tensor]]) -> None:
    found = {name: value for result in results for name, value in result.items()}
    assert set(found) == set(alone)
    for name, value in found.items():
        assert torch.allclose(value, alone[name], atol=1e-6, rtol=0), name


def test_short_integers_travel_by_nccl(patience: Patience) -> None:
    (alone,) = patience.run(1, train_marked, pp=1, backend="auto", accelerator="gpu")
    hold_marked(alone, patience.run(2, train_marked, pp=2, backend="nccl", accelerator="gpu"))
