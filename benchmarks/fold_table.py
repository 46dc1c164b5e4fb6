"""README's table of schedules under a data-parallel all-reduce, simulated.

    python -m benchmarks.fold_table [--microbatches 8 16 32]

Makespan in units of F (B = 2F, free messages) at p=4 for an all-reduce of A = 0, 8 and 32 per rank;
peak activations in full-rank microbatches. One bucket per stage.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.table import Table
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations

COLUMNS = (
    ("1f1b", "none", False),
    ("interleaved_1f1b", "none", True),
    ("foldx_fifo", "grad_reduce", True),
    ("foldx_aiao", "grad_reduce", True),
)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16, 32], metavar="M")
    counts = parser.parse_args().microbatches
    heads = (f"{name}, overlap={overlap}" for name, overlap, _ in COLUMNS)
    table = Table("v, m", *heads, "peak 1f1b / fifo / aiao")
    for v, m in ((v, m) for v in (2, 4) for m in counts):
        cells, peaks = [], []
        for name, overlap, virtual in COLUMNS:
            program = compile_program(
                schedule=name,
                pp=4,
                num_microbatches=m,
                stages_per_rank=v if virtual else 1,
                overlap=overlap,  # type: ignore[arg-type]
            )
            spans = [
                simulate(program, UniformCosts(grad_reduce=a)).makespan for a in (0.0, 8.0, 32.0)
            ]
            cells.append(" / ".join(f"{span:g}" for span in spans))
            if name != "interleaved_1f1b":
                peaks.append(f"{max(peak_activations(program)):g}")
        table.add(f"{v}, {m}", *cells, " / ".join(peaks))
    sys.stdout.write(f"{table}\n")


if __name__ == "__main__":
    main()
