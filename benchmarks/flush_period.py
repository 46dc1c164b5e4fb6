"""What a flush without a barrier is worth: the steady step beside the makespan of one step.

    python -m benchmarks.flush_period [--ranks 4] [--microbatches 8] [--steps 8] [--rounds 3]
        [--realtime]

Emulated compute as in ``pipeline_overhead`` (F, I and W of 10 ms per rank and microbatch, 1 MB
activations, 4 gloo ranks). Steps follow each other with nothing between them; makespan: first start
to last end of a step over all ranks, from the recorder; period: steady time from step to step.
With clipping, the norm's all-reduce is the one synchronisation; shown is the wait of the rank that
waits longest. With post-validation (``late``) ranks go on and the norm follows them. The three ways
take turns within a round; shown are medians over rounds, and the medians of ratios within a round,
because a machine that others use is not equally fast in all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks import overhead_ranks
from benchmarks.overhead_emulation import Emulation
from benchmarks.overhead_engine import Task
from benchmarks.overhead_ours import Ours
from strategies.compiler import compile_program
from strategies.costs.uniform import UniformCosts
from strategies.simulator.engine import simulate
from tests.ranks.pool import Ranks

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
    *,
    schedule: str,
    num_microbatches: int,
    emulation: Emulation,
    steps: int,
    clip: bool,
    late: bool = False,
) -> Steps:
    """Runs steps without a barrier between them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ours = Ours(Task(schedule, ranks, num_microbatches, rank, emulation))
    begun, finished = [], []
    dist.barrier()
    for _ in range(_WARMUPS + steps):
        ours.step(clip=clip, late=late)
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
    ranks: Ranks,
    schedule: str,
    num_microbatches: int,
    *,
    steps: int,
    clip: bool,
    forward_ms: float,
    late: bool = False,
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
        late=late,
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--realtime", action="store_true")
    given = parser.parse_args()
    ranks = Ranks(given.ranks)
    if not all(ranks.run(overhead_ranks.prepare, realtime=given.realtime)):
        raise PermissionError("--realtime: this user may not set SCHED_FIFO. Leave it out.")
    costs = UniformCosts(given.forward_ms, 2 * given.forward_ms)
    write = sys.stdout.write
    write("schedule    simulated: makespan period | measured: makespan period | clipping: period, ")
    write("over free, wait for the norm | late: period, over free, wait (ms)\n")
    for schedule in given.schedules:
        program = compile_program(
            schedule=schedule, pp=given.ranks, num_microbatches=given.microbatches, buckets=0
        )
        timeline = simulate(program, costs)
        options = {"steps": given.steps, "forward_ms": given.forward_ms}
        found = [
            [
                measure(ranks, schedule, given.microbatches, clip=clip, late=late, **options)
                for clip, late in ((False, False), (True, False), (True, True))
            ]
            for _ in range(given.rounds)
        ]
        free, clipped, late = (
            [statistics.median(part) for part in zip(*ways, strict=True)]
            for ways in zip(*found, strict=True)
        )
        over_free = [
            statistics.median(ways[way][1] / ways[0][1] for ways in found) - 1 for way in (1, 2)
        ]
        write(
            f"{schedule:12}{timeline.makespan:19.0f} {timeline.period:6.0f} | "
            f"{free[0]:18.0f} {free[1]:6.1f} | {clipped[1]:16.1f} {over_free[0]:+10.1%} "
            f"{clipped[2]:8.1f} | {late[1]:12.1f} {over_free[1]:+10.1%} {late[2]:6.1f}\n"
        )
    ranks.close()


if __name__ == "__main__":
    # Ranks find what they run by its module's name, which is not __main__ there.
    import benchmarks.flush_period as by_its_name

    by_its_name.main()
