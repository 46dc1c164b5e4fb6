"""How long recomputation passes take on long programs, and simulating what they made.

    python -m tests.benchmarks.pass_speed

The target is about a second for each pass, and milliseconds for a simulation.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from strategies import UniformCosts
from strategies.compiler import compile_compute, compile_plan
from strategies.passes.recompute.add_recompute import add_recompute
from strategies.passes.recompute.optimal import recompute_within
from strategies.plan import Plan, Recompute
from strategies.simulator.engine import replay

REPETITIONS = 5


def main() -> None:
    """Prints a line per pass: milliseconds, median and worst."""
    costs = UniformCosts()
    mario = Recompute("mario")
    for schedule in ("1f1b", "chimera"):
        plan = Plan(schedule, 32, 64, costs=costs)
        compute = compile_compute(plan)
        _line(f"mario, {schedule} pp=32 m=64", lambda c=compute: add_recompute(c, mario, costs))
        program = compile_plan(Plan(schedule, 32, 64, costs=costs, recompute=mario)).train
        table = costs.table(program)
        _line("  simulating it", lambda p=program, t=table: replay(p, t))
    for schedule, cap, split in (("1f1b", 1, False), ("1f1b", 4, True), ("zb_v", 4, False)):
        compute = compile_compute(Plan(schedule, 16, 128, split_backward=split, costs=costs))
        table = costs.table(compute)
        caps = (cap,) * 16
        what = f"optimal, {schedule}{' split' if split else ''} pp=16 m=128, {cap} activations"
        _line(what, lambda c=compute, t=table, k=caps: recompute_within(c, t, k))


def _line(what: str, call: Callable[[], object]) -> None:
    samples = []
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - begun))
    sys.stdout.write(f"{what}: {statistics.median(samples):.0f} ms, worst {max(samples):.0f}\n")


if __name__ == "__main__":
    main()
