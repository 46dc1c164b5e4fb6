"""How long one simulation takes: 1F1B, 32 ranks, 64 microbatches.

    python -m tests.benchmarks.simulator_speed

The program is compiled once, as in a search that replays it against many cost tables.
"""

from __future__ import annotations

import statistics
import sys
import time

from strategies import UniformCosts, compile_program, simulate

REPETITIONS = 20


def main() -> None:
    """Prints one line: instructions, milliseconds to compile, median milliseconds to simulate."""
    begun = time.perf_counter()
    program = compile_program(schedule="1f1b", pp=32, num_microbatches=64)
    compiled_ms = 1e3 * (time.perf_counter() - begun)
    costs = UniformCosts(grad_reduce=4, p2p=0.1)
    samples = []
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        simulate(program, costs)
        samples.append(1e3 * (time.perf_counter() - begun))
    count = sum(map(len, program.ranks))
    sys.stdout.write(
        f"1f1b pp=32 num_microbatches=64: {count} instructions, compiled in {compiled_ms:.0f} ms, "
        f"simulate() {statistics.median(samples):.2f} ms (median of {REPETITIONS})\n"
    )


if __name__ == "__main__":
    main()
