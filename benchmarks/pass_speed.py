"""How long recomputation passes take on long programs, and simulating what they made.

    python -m benchmarks.pass_speed [--ranks 32] [--microbatches 64] [--repetitions 5]

``mario`` is asked for that size, ``optimal`` for half the ranks and twice the microbatches.

The target is about a second for each pass, and milliseconds for a simulation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from strategies import UniformCosts
from strategies.compiler import compile_compute, compile_plan
from strategies.passes.recompute.add_recompute import add_recompute
from strategies.passes.recompute.optimal import recompute_within
from strategies.plan import Plan, Recompute
from strategies.simulator.engine import replay


def main() -> None:
    """Prints a line per pass: milliseconds, median and worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    line = partial(_line, repetitions=given.repetitions)
    costs = UniformCosts()
    mario = Recompute("mario")
    pp, m = given.ranks, given.microbatches
    for schedule in ("1f1b", "chimera"):
        plan = Plan(schedule, pp, m, costs=costs)
        compute = compile_compute(plan)
        line(f"mario, {schedule} pp={pp} m={m}", partial(add_recompute, compute, mario, costs))
        program = compile_plan(Plan(schedule, pp, m, costs=costs, recompute=mario)).train
        line("  simulating it", partial(replay, program, costs.table(program)))
    pp, m = pp // 2, m * 2
    for schedule, cap, split in (("1f1b", 1, False), ("1f1b", 4, True), ("zb_v", 4, False)):
        compute = compile_compute(Plan(schedule, pp, m, split_backward=split, costs=costs))
        table = costs.table(compute)
        what = f"optimal, {schedule}{' split' if split else ''} pp={pp} m={m}, {cap} activations"
        line(what, partial(recompute_within, compute, table, (cap,) * pp))


def _line(what: str, call: Callable[[], object], *, repetitions: int) -> None:
    samples = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - begun))
    sys.stdout.write(f"{what}: {statistics.median(samples):.0f} ms, worst {max(samples):.0f}\n")


if __name__ == "__main__":
    main()
