"""Our lowered programs, run by the pipeline runtime of torch: an independent proof of the order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies import compile_program
from strategies.referee import notation
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
WIDTH, ROWS = 6, 2  # of a microbatch


def _stages(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        for _ in range(count)
    ]


def _batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(2, count * ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return rows[0], rows[1]


def run_by_torch(file: str, owners: tuple[int, ...], count: int) -> dict[str, Any]:
    """One step of a file on this rank: the losses that it sees, and its gradients."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank = dist.get_rank()
    modules = _stages(len(owners))
    mine = [
        PipelineStage(modules[stage], stage, len(owners), torch.device("cpu"))
        for stage, owner in enumerate(owners)
        if owner == rank
    ]
    schedule = _PipelineScheduleRuntime(mine, count, loss_fn=functional.mse_loss)
    schedule._load_csv(file, format="compute_comms")
    rows, targets = _batch(count)
    losses: list[Tensor] = []
    arguments = (rows,) if owners[0] == rank else ()
    if owners[-1] == rank:
        schedule.step(*arguments, target=targets, losses=losses)
    else:
        schedule.step(*arguments)
    return {
        "losses": [float(loss.detach()) for loss in losses],
        "gradients": {
            f"{stage.stage_index}.{name}": parameter.grad
            for stage in mine
            for name, parameter in stage.submod.named_parameters()
        },
    }


def _by_one_process(stages: int, count: int) -> tuple[list[float], dict[str, Tensor]]:
    modules = _stages(stages)
    rows, targets = _batch(count)
    losses = []
    for part, target in zip(rows.split(ROWS), targets.split(ROWS), strict=True):
        for module in modules:
            part = module(part)
        loss = functional.mse_loss(part, target)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {
        f"{number}.{name}": parameter.grad
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "foldx_fifo", "dualpipe_v"]
)
def test_torch_runs_our_order_with_its_messages(
    name: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    pp, count = 2, 6
    program = compile_program(schedule=name, pp=pp, num_microbatches=count)
    file = tmp_path / "order.csv"
    file.write_text(notation(program))
    stages = program.placement.num_stages
    owners = tuple(program.placement.rank_of(stage, 0) for stage in range(stages))
    found = ranks(pp).run(run_by_torch, file=str(file), owners=owners, count=count)
    losses, gradients = _by_one_process(stages, count)
    seen = next(result["losses"] for result in found if result["losses"])
    assert seen == pytest.approx(losses, abs=1e-12)
    names = set()
    for result in found:
        for key, gradient in result["gradients"].items():
            names.add(key)
            assert (gradient - gradients[key]).abs().max() < 1e-12, key
    assert names == set(gradients)
