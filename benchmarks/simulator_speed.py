"""How long one simulation takes: 1F1B, 32 ranks, 64 microbatches; and what faster clocks gain.

    python -m benchmarks.simulator_speed

The program is compiled once, as in a search that replays it against many cost tables. The other
lines justify the copies of the simulator's model that searches have: each is timed beside the
general way to the same figure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from strategies import UniformCosts, compile_program, simulate
from strategies.compiler import compile_compute, compile_plan, order_compute
from strategies.passes.recompute.list_clock import ListClock
from strategies.passes.recompute.mario import apply_checkpoint
from strategies.plan import Plan
from strategies.planner.quick_walk import build_structure, step_time
from strategies.schedules.schedule import Durations
from strategies.schedules.search.lanes import lanes_of, replay
from strategies.schedules.search.weight_gaps import makespan

COSTS = UniformCosts(grad_reduce=4, p2p=0.1)


@dataclass(frozen=True)
class Size:
    """What is timed, and how often."""

    ranks: int
    microbatches: int
    repetitions: int

    def __str__(self) -> str:
        return f"pp={self.ranks} num_microbatches={self.microbatches}"

    def median_ms(self, call: Callable[[], object]) -> float:
        samples = []
        for _ in range(self.repetitions):
            begun = time.process_time()
            call()
            samples.append(1e3 * (time.process_time() - begun))
        return statistics.median(samples)


def main() -> None:
    """Prints a line for the simulator and one for each faster clock: median CPU milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=20)
    given = parser.parse_args()
    size = Size(given.ranks, given.microbatches, given.repetitions)
    begun = time.process_time()
    program = compile_program(schedule="1f1b", pp=size.ranks, num_microbatches=size.microbatches)
    compiled_ms = 1e3 * (time.process_time() - begun)
    count = sum(map(len, program.ranks))
    sys.stdout.write(
        f"1f1b {size}: {count} instructions, compiled in {compiled_ms:.0f} ms, "
        f"simulate() {size.median_ms(lambda: simulate(program, COSTS)):.2f} ms "
        f"(median of {size.repetitions})\n"
    )
    for line in (_lanes(size), _list_clock(size), _quick_walk(size)):
        sys.stdout.write(line + "\n")


def _lanes(size: Size) -> str:
    """An order of F, I and W as numbers, or as a program."""
    program = order_compute(Plan("zb_v", size.ranks // 2, size.microbatches, costs=COSTS))
    ones = (1.0,) * program.placement.num_stages
    durations = Durations(ones, ones, ones, latency=0.1)
    lanes = lanes_of(program.placement, program.num_microbatches)
    rows = lanes.steps(program.ranks)
    quick = size.median_ms(lambda: replay(lanes, durations, rows))
    whole = size.median_ms(lambda: makespan(program.with_ranks(lanes.rows(rows)), durations))
    name = f"lanes.replay, zb_v pp={size.ranks // 2} num_microbatches={size.microbatches}"
    return _line(name, quick, whole)


def _list_clock(size: Size) -> str:
    """One instruction moved in a list, or all lists timed again."""
    program = apply_checkpoint(
        compile_compute(Plan("1f1b", size.ranks, size.microbatches, costs=COSTS))
    )
    table = COSTS.table(program)
    clock = ListClock(program, table)
    place = len(clock.rows[0]) // 3
    node = clock.rows[size.ranks // 2][place]

    def move() -> None:
        changed = clock.hoist(node, place - 1)
        if changed is not None:
            clock.put_back(node, place, changed)

    whole = size.median_ms(lambda: ListClock(program.with_ranks(clock.lists()), table))
    return _line(f"ListClock.hoist, 1f1b {size}", size.median_ms(move), whole)


def _quick_walk(size: Size) -> str:
    """A new plan's step time: of its order, or of its verified program."""
    plan = Plan("1f1b", size.ranks, size.microbatches, costs=COSTS, buckets=1)

    def quick() -> None:
        structure = build_structure(plan)
        table = replace(COSTS.table(structure.draft), reduce=((4.0 / size.ranks,),) * size.ranks)
        step_time(structure, table, overlap=True)

    def whole() -> None:
        compile_plan.cache_clear()
        simulate(compile_plan(plan).train, COSTS)

    return _line(f"quick_walk, 1f1b {size}", size.median_ms(quick), size.median_ms(whole))


def _line(what: str, quick: float, whole: float) -> str:
    return f"{what}: {quick:.2f} ms instead of {whole:.2f}"


if __name__ == "__main__":
    main()
