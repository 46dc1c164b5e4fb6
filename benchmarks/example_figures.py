"""Predicted and measured steps of the scripts in ``examples/``: a table of a guide.

python -m benchmarks.example_figures [SCRIPT ...]

Each script, or each of those named (``resnet.py``), runs once, as it is, on ranks that live on.
Predicted is its program on uniform costs (B = 2 F, the same on every stage): what the order alone
makes of it. Measured is the median over the steps, with everything that two processes on shared
cores do to it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.ranks import rank_pool
from benchmarks.table import Table
from strategies.costs.uniform import UniformCosts
from strategies.simulator.engine import simulate
from tests.distributed.test_example_scripts import EXAMPLES, LEARNED, measured, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="of examples/; all if none")
    asked = parser.parse_args().scripts or list(LEARNED)
    unknown = [name for name in asked if name not in LEARNED]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(LEARNED)}")
    sys.stdout.write(f"{_table(asked)}\n")


def _table(names: list[str]) -> Table:
    table = Table(
        "script", "schedule", "microbatches", "ms per step", "bubble, predicted", "bubble, measured"
    )
    with rank_pool(2) as ranks:
        for name in names:
            if missing(name):
                continue
            with tempfile.TemporaryDirectory() as folder:
                timeline = ranks.run(measured, path=str(EXAMPLES / name), folder=folder)[0]
            if timeline is None:  # manual optimization: a program per backward
                table.add(f"`{Path(name).stem}`", *[""] * 5)
                continue
            program = timeline.program
            predicted = simulate(program, UniformCosts())
            table.add(
                f"`{Path(name).stem}`",
                f"`{program.schedule}`",
                program.num_microbatches,
                f"{1000 * timeline.makespan:.1f}",
                f"{100 * predicted.bubble_ratio:.1f} %",
                f"{100 * timeline.bubble_ratio:.1f} %",
            )
    return table


if __name__ == "__main__":
    main()
