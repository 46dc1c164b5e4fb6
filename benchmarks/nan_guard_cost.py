"""What looking for NaN costs: steady steps without, with, and with clipping besides.

    python -m benchmarks.nan_guard_cost [--microbatches 8] [--steps 12] [--forward-ms 10]

Emulated compute as in ``flush_period``: 4 gloo ranks, stages that sleep, 1 MB activations, steps
that follow each other with nothing between them. Without clipping the ranks of a pipeline agree at
the flush; with clipping the norm's all-reduce says it all. Shown are medians of the period in ms,
the runs of one schedule in turn, and what the simulator says of a step whose ranks wait at the
flush (its makespan) and of one whose ranks do not (its period).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch.distributed as dist

from benchmarks import overhead_ranks
from benchmarks.overhead_emulation import Emulation
from benchmarks.overhead_engine import Task
from benchmarks.overhead_ours import Ours
from strategies.compiler import compile_program
from strategies.costs.uniform import UniformCosts
from strategies.simulator.engine import simulate
from tests.ranks.pool import Ranks

SCHEDULES = ("1f1b", "foldx_fifo", "zb_h1", "zb_h2", "zb_v")
KINDS = {
    "ignore": {"watch_nan": False, "clip": False},
    "guarded": {"watch_nan": True, "clip": False},
    "clipped": {"watch_nan": False, "clip": True},
    "both": {"watch_nan": True, "clip": True},
}
_WARMUPS, _TURNS = 2, 3


def run_steps(
    *,
    schedule: str,
    num_microbatches: int,
    emulation: Emulation,
    steps: int,
    watch_nan: bool,
    clip: bool,
) -> float:
    """Seconds per step on this rank, steady."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ours = Ours(Task(schedule, ranks, num_microbatches, rank, emulation), watch_nan=watch_nan)
    finished = []
    dist.barrier()
    for _ in range(_WARMUPS + steps):
        ours.step(clip=clip)
        finished.append(time.perf_counter())
    dist.barrier()
    ours.close()
    return (finished[-1] - finished[_WARMUPS - 1]) / steps


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    given = parser.parse_args()
    ranks = Ranks(4)
    ranks.run(overhead_ranks.prepare, realtime=False)
    write = sys.stdout.write
    write(f"{'schedule':12}" + "".join(f"{kind:>9}" for kind in KINDS))
    write("   simulated: period, makespan (ms)\n")
    for schedule in SCHEDULES:
        program = compile_program(
            schedule=schedule, pp=4, num_microbatches=given.microbatches, buckets=0
        )
        timeline = simulate(program, UniformCosts(given.forward_ms, 2 * given.forward_ms))
        each = given.forward_ms / 1e3 * 4 / program.placement.num_stages
        periods: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(_TURNS):
            for kind, options in KINDS.items():
                found: list[float] = ranks.run(
                    run_steps,
                    schedule=schedule,
                    num_microbatches=given.microbatches,
                    emulation=Emulation(each, each, each, 2**18),
                    steps=given.steps,
                    **options,
                )
                periods[kind].append(statistics.median(found) * 1e3)
        cells = "".join(f"{statistics.median(times):9.1f}" for times in periods.values())
        write(f"{schedule:12}{cells}{timeline.period:13.0f}{timeline.makespan:9.0f}\n")
    ranks.close()


if __name__ == "__main__":
    main()
