"""A run of torch's own pipeline, recorded with one slow rank and explained."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.compiler import compile_plan
from strategies.costs.uniform import UniformCosts
from strategies.plan import Plan
from strategies.referee.trace import explain, put_together, read_trace
from strategies.simulator.engine import simulate
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
# Asleep, and for long: what else the machine does is small beside it.
FORWARD_S, BACKWARD_S, SLOW = 0.06, 0.12, 2
PP, COUNT = 2, 4


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, times: int) -> Tensor:
        context.times = times
        time.sleep(times * FORWARD_S)
        return rows.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        time.sleep(context.times * BACKWARD_S)
        return gradients[0].clone(), None


class _Stage(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(4, 4), times

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = _Asleep.apply(self.linear(rows), self.times)
        return found


def record(folder: str, interleaved: bool) -> list[tuple[float, float]]:
    """One step under the profiler; what each computation took by clocks of our own."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

    rank, chunks = dist.get_rank(), 2 if interleaved else 1
    stages = [
        PipelineStage(
            _Stage(SLOW if rank == 1 else 1), chunk * PP + rank, chunks * PP, torch.device("cpu")
        )
        for chunk in range(chunks)
    ]
    taken: list[tuple[float, float]] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*words: Any, **keys: Any) -> Any:
            start = time.perf_counter()
            result = function(*words, **keys)
            taken.append((start, time.perf_counter()))
            return result

        return run

    for stage in stages:
        stage.forward_one_chunk = timed(stage.forward_one_chunk)
        stage.backward_one_chunk = timed(stage.backward_one_chunk)
    loss = functional.mse_loss
    schedule: Any = (
        ScheduleInterleaved1F1B(stages, COUNT, loss_fn=loss)
        if interleaved
        else ScheduleGPipe(stages[0], COUNT, loss_fn=loss)
    )
    rows = torch.ones(2 * COUNT, 4)

    def step() -> None:
        if rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=rows, losses=[])

    step()
    taken.clear()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    return taken


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_slow_rank_of_torchs_pipeline_is_named_and_its_bubble_is_right(
    interleaved: bool, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    taken = ranks(PP).run(record, folder=str(tmp_path), interleaved=interleaved)
    traces = [read_trace(tmp_path / f"rank{rank}.json") for rank in range(PP)]
    found = explain(put_together(traces))
    assert found.slow_rank is not None and found.slow_rank[0] == 1
    assert found.slow_rank[1] == pytest.approx(SLOW, rel=0.1)
    first, last = min(s for row in taken for s, _ in row), max(e for row in taken for _, e in row)
    busy = sum(end - start for row in taken for start, end in row)
    truth = 1 - busy / (PP * (last - first))
    assert found.measured.timeline.bubble_ratio == pytest.approx(truth, abs=0.02)
    # What is left without the slow rank is the bubble of the order with what every stage sleeps.
    name = "interleaved_1f1b" if interleaved else "gpipe"
    even = UniformCosts(1.0, 2.0)
    left = simulate(compile_plan(Plan(name, PP, COUNT, costs=even)).train, even).bubble_ratio
    assert found.without_slow is not None
    assert found.without_slow.bubble_ratio == pytest.approx(left, abs=0.02)
    rank, _, _ = next(iter(found.blame))
    assert rank == 1
