"""The exchange of experts' tokens on shaped links: in turn with compute, and under it.

    sudo python -m benchmarks.exchange_on_links [--steps 5] [--rate-mbit 120]

Four hosts are network namespaces (``link_hosts``), two stages by two replicas that share
experts (ep=2). Compute sleeps, rows of tokens are there and cross the links. The rate is given, and
rows are as large as makes all exchanges take ``--share`` of the compute where nothing hides them,
as it is measured first.

Four contenders in one process tree, one after the other: without any exchange (every rank computes
its rows itself), with it in turn, with ``overlap.exchange=true``, and the 1F1B of
torch.distributed.pipelining with the same layers. Beside each the simulator's step for the link as
it was measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.engine import Engine, in_turns, ready, timed
from benchmarks.link_hosts import hosts, run_on
from benchmarks.runtime import Ours
from benchmarks.table import Table
from benchmarks.torch_pipelining import TorchPipeline
from strategies.compiler import compile_plan
from strategies.costs.table import CostTable
from strategies.costs.token_exchange import Exchange
from strategies.costs.uniform import UniformCosts
from strategies.ir.program import Program
from strategies.models.expert_parallel import ExpertRanks
from strategies.models.unit_model import UnitModel
from strategies.plan import Options, Plan
from strategies.runtime.messages.mesh import Coordinates
from strategies.simulator.engine import simulate

PP, EP, LAYERS, TOKENS, WIDTH = 2, 2, 4, 8, 16
FORWARD_S = 0.2  # a stage's forward, half of it experts'; a backward takes twice that


@dataclass(frozen=True)
class Task:
    """What is asked for; equal on all ranks."""

    steps: int
    microbatches: int
    row_elements: int
    travel_s: float = 0.0  # what an exchange is to take


class _Slept(Function):
    """Compute of a known duration in either direction."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layer(nn.Module):
    """Something like attention, then experts, to which half of the rows go each."""

    expert_parameters = ("scale",)

    def __init__(self, row_elements: int) -> None:
        super().__init__()
        self.num_experts = EP
        self.exchange: ExpertRanks | None = None
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(EP, 1))
        self._row = row_elements
        self._piece_s = FORWARD_S * PP / LAYERS / 2

    def forward(self, stream: Tensor) -> Tensor:
        stream = _slept(stream * self.weight, self._piece_s)
        rows = stream[:, :1].expand(-1, self._row).contiguous()
        counts = torch.full((EP,), len(rows) // EP)
        around = self.exchange
        found = (
            self.compute(rows, counts)
            if around is None
            else around.around(self.compute, rows, counts)
        )
        return stream + found[:, :WIDTH]

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        return _slept(rows, self._piece_s) * self.scale.mean()


def _slept(data: Tensor, seconds: float) -> Tensor:
    result: Tensor = _Slept.apply(data, seconds)  # type: ignore[no-untyped-call]
    return result


class Model(nn.Module):
    """Layers as units; the loss is a mean."""

    def __init__(self, row_elements: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(row_elements) for _ in range(LAYERS))

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [(f"layers.{n}", layer) for n, layer in enumerate(self.layers)]

    def pipeline_inputs(self, batch: Tensor) -> tuple[Tensor, ...]:
        return (batch.flatten(0, 1),)

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        loss: Tensor = tensors[0].mean()
        return loss


def _ours(task: Task, rank: int, *, ep: int, pairs: bool) -> Ours:
    """A whole step without an optimizer."""
    return Ours(
        UnitModel(Model(task.row_elements)),
        Plan("eager_1f1b", pp=PP, num_microbatches=task.microbatches, pairs=pairs),
        torch.ones(task.microbatches, TOKENS, WIDTH),
        options=Options(dp=EP, ep=ep, backend="gloo", on_nan="ignore", check_batches=False),
        where=Coordinates.of(rank, pp=PP, dp=EP, ep=ep),
    )


def _torch(task: Task, rank: int) -> TorchPipeline:
    """torch.distributed.pipelining's 1F1B over the same layers, which exchange in turn."""
    where = Coordinates.of(rank, pp=PP, dp=EP, ep=EP)
    pipelines = [dist.new_group(list(where.pipeline(d))) for d in range(EP)]
    block, half = _block(rank), LAYERS // PP
    layers = list(Model(task.row_elements).layers)[where.pp_rank * half :][:half]
    for layer in layers:
        assert isinstance(layer, Layer)
        layer.exchange = ExpertRanks(block)
        layer.scale = nn.Parameter(layer.scale.detach()[:1].clone())
    batch = torch.ones(task.microbatches * TOKENS, WIDTH, requires_grad=True)
    return TorchPipeline(
        "1f1b",
        {where.pp_rank: nn.Sequential(*layers)},
        num_stages=PP,
        num_microbatches=task.microbatches,
        batch=batch,
        target=batch,
        loss=lambda output, _: output.mean(),
        group=pipelines[where.dp_rank],
    )


def _block(rank: int) -> Any:
    """The ranks that share experts with this one."""
    return [dist.new_group([p * EP, p * EP + 1]) for p in range(PP)][rank // EP]


class LinkCosts:
    """What the simulator is told: the sleeps, and the exchange as it was measured alone."""

    def __init__(self, travel_s: float) -> None:
        self.exchange_s = 2 * LAYERS / PP * travel_s  # of a stage's forward

    def table(self, program: Program) -> CostTable:
        table = UniformCosts(forward=FORWARD_S, backward=2 * FORWARD_S).table(program)
        more, count = self.exchange_s, len(table.forward)
        return replace(
            table,
            forward=(FORWARD_S + more,) * count,
            backward=(2 * FORWARD_S + more,) * count,
            backward_input=(FORWARD_S + more,) * count,
            exchange=(Exchange(more, LAYERS // PP),) * count,
        )


def predicted(schedule: str, task: Task, travel_s: float, *, pairs: bool) -> float:
    plan = Plan(schedule, pp=PP, num_microbatches=task.microbatches, pairs=pairs, buckets=0)
    return simulate(compile_plan(plan).train, LinkCosts(travel_s)).makespan


def _calibrated(task: Task, rank: int) -> tuple[Task, float]:
    """Rows whose exchange takes what is asked, and what it takes; equal on all ranks."""
    block = _block(rank)
    for _ in range(4):
        found = _travel_s(task, ExpertRanks(block), block)
        if abs(found / task.travel_s - 1.0) < 0.02:
            break
        size = max(WIDTH, int(task.row_elements * task.travel_s / found))
        task = replace(task, row_elements=size)
    return task, _travel_s(task, ExpertRanks(block), block)


def _travel_s(task: Task, ranks: ExpertRanks, block: Any) -> float:
    """Half of a layer's exchange, the slower rank's median, with nothing beside it.

    As in a step there is compute in front and in between: a connection that has been idle begins
    slowly, and ranks tell each other first how much will come.
    """
    rows, counts = torch.ones(TOKENS, task.row_elements), torch.full((EP,), TOKENS // EP)
    piece_s, taken = FORWARD_S * PP / LAYERS / 2, []

    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        time.sleep(piece_s)
        return rows

    for _ in range(8):
        dist.barrier(group=block)
        time.sleep(piece_s)
        started = time.perf_counter()
        ranks.around(compute, rows, counts)
        taken.append((time.perf_counter() - started - piece_s) / 2)
    slowest = torch.tensor(statistics.median(taken[2:]), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def run_rank(rank: int, *, steps: int, microbatches: int, elements: int, travel_s: float) -> Any:
    """What an exchange takes, and of each contender the step and what is predicted; in seconds."""
    task, travel_s = _calibrated(Task(steps, microbatches, elements, travel_s), rank)
    engines: dict[str, Engine] = {
        "no exchange": _ours(task, rank, ep=1, pairs=False),
        "in turn": _ours(task, rank, ep=EP, pairs=False),
        "under compute": _ours(task, rank, ep=EP, pairs=True),
        "torch 1F1B, in turn": _torch(task, rank),
    }
    told = {
        "no exchange": predicted("eager_1f1b", task, 0.0, pairs=False),
        "in turn": predicted("eager_1f1b", task, travel_s, pairs=False),
        "under compute": predicted("eager_1f1b", task, travel_s, pairs=True),
        "torch 1F1B, in turn": predicted("1f1b", task, travel_s, pairs=False),
    }
    with ready(*engines.values()):
        taken = in_turns(
            engines, lambda name: timed(engines[name].step)[0], warmups=1, repetitions=steps
        )
    return travel_s, {name: (statistics.median(taken[name]), told[name]) for name in engines}


def main() -> None:
    """Makes the hosts, runs the ranks, prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rate-mbit", type=float, default=120.0)
    parser.add_argument("--share", type=float, default=0.3)
    asked = parser.parse_args()
    travels = 4 * LAYERS / PP  # in a stage's forward and backward
    wanted_s = asked.share * 3 * FORWARD_S / travels
    # Half of the rows cross the link.
    elements = int(wanted_s * asked.rate_mbit * 1e6 / 8 / 4 / (TOKENS / EP))
    with hosts(PP * EP, interfaces=1, rate_mbit=asked.rate_mbit) as names:
        travel_s, found = run_on(
            names, "benchmarks.exchange_on_links:run_rank", steps=asked.steps,
            microbatches=asked.microbatches, elements=elements, travel_s=wanted_s,
        )  # fmt: skip
    base = found["no exchange"][0]
    share = f"{travel_s * travels / (3 * FORWARD_S):.0%} of the compute"
    table = Table("", "step", "over no exchange", "predicted", "off", numbers=True)
    for name, (step, told) in found.items():
        ratio, off = f"{step / base:.3f}", f"{told / step - 1:+.1%}"
        table.add(name, f"{1e3 * step:.0f} ms", ratio, f"{1e3 * told:.0f} ms", off)
    sys.stdout.write(f"exchanges: {1e3 * travel_s:.2f} ms each, {share}\n\n{table}\n")


if __name__ == "__main__":
    main()
