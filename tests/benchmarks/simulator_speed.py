"""How long one simulation takes: 1F1B, 32 ranks, 64 microbatches; and what faster clocks gain.

    python -m tests.benchmarks.simulator_speed

The program is compiled once, as in a search that replays it against many cost tables. The other
lines justify the copies of the simulator's model that searches have: each is timed beside the
general way to the same figure.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from strategies import UniformCosts, compile_program, simulate
from strategies.compiler import compile_compute, compile_plan, order_compute
from strategies.passes.recompute.list_clock import ListClock
from strategies.passes.recompute.mario import apply_checkpoint
from strategies.plan import Plan
from strategies.planner.quick_walk import build_structure, step_time
from strategies.schedules.schedule import Durations
from strategies.schedules.search.lanes import lanes_of, replay
from strategies.schedules.search.weight_gaps import makespan

REPETITIONS = 20
COSTS = UniformCosts(grad_reduce=4, p2p=0.1)


def main() -> None:
    """Prints a line for the simulator and one for each faster clock: median CPU milliseconds."""
    begun = time.process_time()
    program = compile_program(schedule="1f1b", pp=32, num_microbatches=64)
    compiled_ms = 1e3 * (time.process_time() - begun)
    count = sum(map(len, program.ranks))
    sys.stdout.write(
        f"1f1b pp=32 num_microbatches=64: {count} instructions, compiled in {compiled_ms:.0f} ms, "
        f"simulate() {_median_ms(lambda: simulate(program, COSTS)):.2f} ms "
        f"(median of {REPETITIONS})\n"
    )
    for line in (_lanes(), _list_clock(), _quick_walk()):
        sys.stdout.write(line + "\n")


def _lanes() -> str:
    """An order of F, I and W as numbers, or as a program."""
    program = order_compute(Plan("zb_v", 16, 64, costs=COSTS))
    ones = (1.0,) * program.placement.num_stages
    durations = Durations(ones, ones, ones, latency=0.1)
    lanes = lanes_of(program.placement, program.num_microbatches)
    rows = lanes.steps(program.ranks)
    quick = _median_ms(lambda: replay(lanes, durations, rows))
    whole = _median_ms(lambda: makespan(program.with_ranks(lanes.rows(rows)), durations))
    return _line("lanes.replay, zb_v pp=16 num_microbatches=64", quick, whole)


def _list_clock() -> str:
    """One instruction moved in a list, or all lists timed again."""
    program = apply_checkpoint(compile_compute(Plan("1f1b", 32, 64, costs=COSTS)))
    table = COSTS.table(program)
    clock = ListClock(program, table)
    node = clock.rows[16][40]

    def move() -> None:
        changed = clock.hoist(node, 39)
        if changed is not None:
            clock.put_back(node, 40, changed)

    whole = _median_ms(lambda: ListClock(program.with_ranks(clock.lists()), table))
    return _line("ListClock.hoist, 1f1b pp=32 num_microbatches=64", _median_ms(move), whole)


def _quick_walk() -> str:
    """A new plan's step time: of its order, or of its verified program."""
    plan = Plan("1f1b", 32, 64, costs=COSTS, buckets=1)

    def quick() -> None:
        structure = build_structure(plan)
        table = replace(COSTS.table(structure.draft), reduce=((4.0 / 32,),) * 32)
        step_time(structure, table, overlap=True)

    def whole() -> None:
        compile_plan.cache_clear()
        simulate(compile_plan(plan).train, COSTS)

    name = "quick_walk, 1f1b pp=32 num_microbatches=64"
    return _line(name, _median_ms(quick), _median_ms(whole))


def _line(what: str, quick: float, whole: float) -> str:
    return f"{what}: {quick:.2f} ms instead of {whole:.2f}"


def _median_ms(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(REPETITIONS):
        begun = time.process_time()
        call()
        samples.append(1e3 * (time.process_time() - begun))
    return statistics.median(samples)


if __name__ == "__main__":
    main()
