"""What a flush without a barrier is worth: the steady step beside the makespan of one step.

    python -m tests.benchmarks.flush_period [--ranks 4] [--microbatches 8] [--steps 8] [--realtime]

Emulated compute as in ``pipeline_overhead`` (F, I and W of 10 ms per rank and microbatch, 1 MB
activations, 4 gloo ranks). Steps follow each other with nothing between them; makespan: first start
to last end of a step over all ranks, from the recorder; period: steady time from step to step.
With clipping, the norm's all-reduce is the one synchronisation; shown is the wait of the rank that
waits longest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch.distributed as dist

from strategies.compiler import compile_program
from strategies.costs.uniform import UniformCosts
from strategies.simulator.engine import simulate
from tests.benchmarks import overhead_ranks
from tests.benchmarks.overhead_emulation import Emulation
from tests.benchmarks.overhead_engine import Task
from tests.benchmarks.overhead_ours import Ours
from tests.distributed.pool import Ranks

SCHEDULES = ("1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
_WARMUPS = 2


@dataclass(frozen=True, slots=True)
class Steps:
    """Steady steps on one rank.

    Attributes:
        begun: Clock at the first instruction of each step.
        finished: Clock when each step had ended on this rank.
        norm_wait_s: Median wait in the norm's all-reduce; 0 without clipping.
    """

    begun: tuple[float, ...]
    finished: tuple[float, ...]
    norm_wait_s: float


def run_steps(
    *, schedule: str, num_microbatches: int, emulation: Emulation, steps: int, clip: bool
) -> Steps:
    """Runs steps without a barrier between them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ours = Ours(Task(schedule, ranks, num_microbatches, rank, emulation))
    begun, finished = [], []
    dist.barrier()
    for _ in range(_WARMUPS + steps):
        ours.step(clip=clip)
        record = ours.last_record()
        begun.append(record.begun)
        finished.append(time.perf_counter())
    waits = list(ours.norm_waits())
    dist.barrier()
    ours.close()
    kept = slice(_WARMUPS, None)
    wait = statistics.median(waits) if waits else 0.0
    return Steps(tuple(begun[kept]), tuple(finished[kept]), wait)


def measure(
    ranks: Ranks, schedule: str, num_microbatches: int, *, steps: int, clip: bool, forward_ms: float
) -> tuple[float, float, float]:
    """(makespan, period, longest wait for the norm) in ms, medians."""
    stages = 2 if schedule in ("zb_v", "dualpipe_v") else 1
    each = forward_ms / 1e3 / stages
    found: list[Steps] = ranks.run(
        run_steps,
        schedule=schedule,
        num_microbatches=num_microbatches,
        emulation=Emulation(each, each, each, 2**18),
        steps=steps,
        clip=clip,
    )
    spans = [
        max(rank.finished[step] for rank in found) - min(rank.begun[step] for rank in found)
        for step in range(steps)
    ]
    ends = [rank.finished[-1] - rank.finished[0] for rank in found]
    period = statistics.median(ends) / (steps - 1)
    wait = max(rank.norm_wait_s for rank in found)
    return statistics.median(spans) * 1e3, period * 1e3, wait * 1e3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, metavar="NAME")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--realtime", action="store_true")
    given = parser.parse_args()
    ranks = Ranks(given.ranks)
    if not all(ranks.run(overhead_ranks.prepare, realtime=given.realtime)):
        raise PermissionError("--realtime: this user may not set SCHED_FIFO. Leave it out.")
    costs = UniformCosts(given.forward_ms, 2 * given.forward_ms)
    write = sys.stdout.write
    write("schedule    simulated: makespan period | measured: makespan period | clipping: ")
    write("period, wait for the norm (ms)\n")
    for schedule in given.schedules:
        program = compile_program(
            schedule=schedule, pp=given.ranks, num_microbatches=given.microbatches, buckets=0
        )
        timeline = simulate(program, costs)
        options = {"steps": given.steps, "forward_ms": given.forward_ms}
        free = measure(ranks, schedule, given.microbatches, clip=False, **options)
        clipped = measure(ranks, schedule, given.microbatches, clip=True, **options)
        write(
            f"{schedule:12}{timeline.makespan:19.0f} {timeline.period:6.0f} | "
            f"{free[0]:18.0f} {free[1]:6.0f} | {clipped[1]:16.0f} {clipped[2]:6.0f}\n"
        )
    ranks.close()


if __name__ == "__main__":
    main()
