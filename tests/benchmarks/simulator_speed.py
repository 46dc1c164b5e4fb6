"""How long one simulation takes: 1F1B, 32 ranks, 64 microbatches.

    python -m tests.benchmarks.simulator_speed [--ranks 32] [--microbatches 64] [--repetitions 20]

The program is compiled once, as in a search that replays it against many cost tables.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from strategies import UniformCosts, compile_program, simulate


def main() -> None:
    """Prints one line: instructions, milliseconds to compile, median milliseconds to simulate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=20)
    given = parser.parse_args()
    pp, count = given.ranks, given.microbatches
    begun = time.perf_counter()
    program = compile_program(schedule="1f1b", pp=pp, num_microbatches=count)
    compiled_ms = 1e3 * (time.perf_counter() - begun)
    costs = UniformCosts(grad_reduce=4, p2p=0.1)
    samples = []
    for _ in range(given.repetitions):
        begun = time.perf_counter()
        simulate(program, costs)
        samples.append(1e3 * (time.perf_counter() - begun))
    instructions = sum(map(len, program.ranks))
    sys.stdout.write(
        f"1f1b pp={pp} num_microbatches={count}: {instructions} instructions, "
        f"compiled in {compiled_ms:.0f} ms, "
        f"simulate() {statistics.median(samples):.2f} ms (median of {given.repetitions})\n"
    )


if __name__ == "__main__":
    main()
