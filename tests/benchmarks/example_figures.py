"""Predicted and measured steps of the scripts in ``examples/``: a table of a guide.

python -m tests.benchmarks.example_figures

Each script runs once, as it is, on ranks that live on. Predicted is its program on uniform costs
(B = 2 F, the same on every stage): what the order alone makes of it. Measured is the median over
the steps, with everything that two processes on shared cores do to it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from strategies.costs.uniform import UniformCosts
from strategies.simulator.engine import simulate
from tests.distributed.pool import Ranks
from tests.distributed.test_example_scripts import EXAMPLES, LEARNED, measured, missing

_HEAD = (
    "| script | schedule | microbatches | ms per step | bubble, predicted | bubble, measured |\n"
    "|---|---|---|---|---|---|"
)


def main() -> None:
    sys.stdout.write("\n".join((_HEAD, *_lines())) + "\n")


def _lines() -> Iterator[str]:
    ranks = Ranks(2)
    try:
        for name in LEARNED:
            if missing(name):
                continue
            with tempfile.TemporaryDirectory() as folder:
                timeline = ranks.run(measured, path=str(EXAMPLES / name), folder=folder)[0]
            if timeline is None:  # manual optimization: a program per backward
                yield f"| `{Path(name).stem}` | | | | | |"
                continue
            program = timeline.program
            predicted = simulate(program, UniformCosts())
            yield (
                f"| `{Path(name).stem}` | `{program.schedule}` | {program.num_microbatches} | "
                f"{1000 * timeline.makespan:.1f} | {100 * predicted.bubble_ratio:.1f} % | "
                f"{100 * timeline.bubble_ratio:.1f} % |"
            )
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
