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
from collections.abc import Iterator
from pathlib import Path

from strategies.costs.uniform import UniformCosts
from strategies.simulator.engine import simulate
from tests.distributed.test_example_scripts import EXAMPLES, LEARNED, measured, missing
from tests.ranks.pool import Ranks

_HEAD = (
    "| script | schedule | microbatches | ms per step | bubble, predicted | bubble, measured |\n"
    "|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="of examples/; all if none")
    asked = parser.parse_args().scripts or list(LEARNED)
    unknown = [name for name in asked if name not in LEARNED]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(LEARNED)}")
    sys.stdout.write("\n".join((_HEAD, *_lines(asked))) + "\n")


def _lines(names: list[str]) -> Iterator[str]:
    ranks = Ranks(2)
    try:
        for name in names:
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
