"""The emulated part of ``prediction``: sleeping stages in this project's runtime, 4 ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from strategies.compiler import compile_plan
from strategies.costs.profile import Link
from strategies.costs.table import CostTable
from strategies.costs.uniform import UniformCosts
from strategies.ir.program import Program
from strategies.plan import Plan
from strategies.recompute import Recompute
from strategies.runtime.engine import Engine, Options
from strategies.runtime.mesh import Coordinates
from strategies.runtime.profiling.links import measure_links
from strategies.simulator.engine import simulate
from tests.benchmarks import overhead_ranks
from tests.benchmarks.overhead_emulation import TOKENS, Emulation
from tests.benchmarks.overhead_ours import SleepingModel
from tests.distributed.pool import Ranks

RANKS = 4
FORWARD_S = 8e-3  # of one sequence on one rank; B is twice as long
ELEMENTS = 2**18
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class EmulatedCosts:
    """What sleeping stages take, and a link as it was measured.

    Attributes:
        compute: Seconds.
        link: Between any two ranks.
    """

    compute: UniformCosts
    link: Link

    def table(self, program: Program) -> CostTable:
        count = len(program.boundaries)
        return replace(
            self.compute.table(program),
            time_unit="s",
            latency=(self.link.latency_s,) * count,
            occupancy=(ELEMENTS * 4 / self.link.bandwidth,) * count,
        )


def cases(*, quick: bool) -> Iterator[tuple[str, str, int, int]]:
    """(schedule, recompute, microbatches, microbatch size)."""
    unsplit = ("gpipe", "1f1b", "interleaved_1f1b", "foldx_fifo")
    if quick:
        yield from (("1f1b", "none", 4, 1), ("1f1b", "full", 4, 1), ("zb_v", "none", 4, 1))
        return
    for count, size in ((8, 1), (12, 1), (8, 2)):
        for schedule in unsplit:
            for recompute in ("none", "full", "mario"):
                yield schedule, recompute, count, size
        for schedule in ("eager_1f1b", "zb_h1", "zb_v", "chimera"):
            yield schedule, "none", count, size


def measure(*, steps: int, quick: bool) -> Iterator[tuple[str, float, float, float, float]]:
    """(name, predicted, measured step time, predicted, measured compute) of all cases."""
    ranks = Ranks(RANKS)
    ranks.run(overhead_ranks.prepare, realtime=False)
    link = ranks.run(link_of_two)[0]
    for schedule, recompute, count, size in cases(quick=quick):
        forward = FORWARD_S * size
        costs = EmulatedCosts(UniformCosts(forward, 2 * forward), link)
        plan = Plan(
            schedule,
            pp=RANKS,
            num_microbatches=count,
            buckets=0,
            costs=costs,
            recompute=Recompute(recompute),  # type: ignore[arg-type]
        )
        program = compile_plan(plan).train
        if program.placement.weight_copies > 1:
            plan = replace(plan, buckets=1)
            program = compile_plan(plan).train
        each = forward / program.placement.stages_per_microbatch
        found = ranks.run(
            run_steps, plan=plan, emulation=Emulation(each, each, each, ELEMENTS), steps=steps
        )
        spans = [
            max(end for _, end in step) - min(begin for begin, _ in step)
            for step in zip(*(steps for steps, _ in found), strict=True)
        ]
        timeline = simulate(program, costs)
        yield (
            f"{schedule}, {recompute}, {count} x {size}",
            timeline.makespan,
            statistics.median(spans),
            sum(map(timeline.busy, range(RANKS))),
            sum(busy for _, busy in found),
        )
    ranks.close()


def link_of_two() -> Link | None:
    """What messages take between the first two ranks."""
    found = measure_links(0, 1, backend="gloo", device=torch.device("cpu"))
    return None if found is None else found[0]


def run_steps(
    *, plan: Plan, emulation: Emulation, steps: int
) -> tuple[list[tuple[float, float]], float]:
    """(begin and end of each step on this rank, its compute); all ranks begin together."""
    rank = dist.get_rank()
    placement = compile_plan(plan).train.placement
    engine = Engine(
        model=SleepingModel(placement.num_stages, emulation),
        plan=plan,
        buckets_open=False,
        options=Options(check_batches=False),
        coordinates=Coordinates(RANKS, 1, rank, 0),
        device=torch.device("cpu"),
    )
    engine.build_gradients()
    batch = torch.zeros(plan.num_microbatches, TOKENS)
    spans = []
    for step in range(_WARM_UPS + steps):
        dist.barrier()
        begun = time.perf_counter()
        engine.train_pass(batch, batch_idx=0, step=step, accumulation=1, update=True)
        engine.restore_gradients()
        engine.flush()
        engine.stepped()
        spans.append((begun, time.perf_counter()))
    dist.barrier()
    records = list(engine.recorder.kept)[_WARM_UPS:]
    busy = statistics.median(engine.recorder.spans(record).busy for record in records)
    engine.close()
    return spans[_WARM_UPS:], busy
