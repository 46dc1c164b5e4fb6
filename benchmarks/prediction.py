"""Predicted against measured: step time and memory of many configurations.

    python -m benchmarks.prediction [--part emulated|real] [--steps 10]

Two parts, each over schedules x recompute x microbatches x microbatch size:

- emulated: 4 ranks whose compute sleeps (16 ms per sequence and forward), 1 MB messages. Predicted
  from one stage's instructions measured by themselves, and a measured link.
- real: a small transformer on 2 ranks. ``mode=profile`` measures its layers, two runs correct the
  profile (as ``costs.refine`` does), and ``costs=profiled`` predicts all others: in rounds, of
  which the quietest counts. Memory is what autograd has saved, at each rank's worst moment.

Printed are the mean absolute percentage error (MAPE), the worst, and Kendall's tau of the ranking.
Other programs on the machine disturb it: run it alone, or before them (``chrt -r 10 python ...``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import prediction_emulated, prediction_real
from benchmarks.table import Table, kendall_tau
from benchmarks.trained import memory_error


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration.

    Attributes:
        part: ``emulated`` or ``real``.
        name: Schedule, recompute, microbatches, microbatch size.
        predicted_s: Step time.
        measured_s: Step time.
        predicted_busy_s: Compute of all ranks in it.
        measured_busy_s: The same.
        predicted_bytes: Per rank; () where there is nothing to measure.
        measured_bytes: Per rank.
    """

    part: str
    name: str
    predicted_s: float
    measured_s: float
    predicted_busy_s: float
    measured_busy_s: float
    predicted_bytes: tuple[int, ...] = ()
    measured_bytes: tuple[int, ...] = ()

    @property
    def error(self) -> float:
        """Of the time, relative and signed."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def compute_error(self) -> float:
        """The part of it that is not the order's but the instructions' own."""
        return self.predicted_busy_s / self.measured_busy_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """Of the rank that is worst predicted."""
        return memory_error(self.predicted_bytes, self.measured_bytes)


_HEADS = (
    "part", "schedule, recompute, microbatches x size", "predicted ms", "measured ms", "error",
    "of compute alone", "memory error",
)  # fmt: skip


def add(table: Table, row: Row) -> str:
    """A line of a configuration."""
    return table.add(
        row.part,
        row.name,
        f"{row.predicted_s * 1e3:.1f}",
        f"{row.measured_s * 1e3:.1f}",
        f"{row.error:+.1%}",
        f"{row.compute_error:+.1%}",
        "" if row.memory_error is None else f"{row.memory_error:+.1%}",
    )


def summary(rows: list[Row]) -> str:
    """One line for all rows of a part."""
    errors = [abs(row.error) for row in rows]
    tau = kendall_tau([r.predicted_s for r in rows], [r.measured_s for r in rows])
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None]
    text = (
        f"{rows[0].part}: {len(rows)} configurations, step time MAPE "
        f"{sum(errors) / len(errors):.1%} (worst {max(errors):.1%}), Kendall tau {tau:.3f}"
    )
    if memory:
        text += f"; memory MAPE {sum(memory) / len(memory):.2%} (worst rank {max(memory):.2%})"
    return text


def main() -> None:
    """Prints the table and the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("emulated", "real"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4, help="of the emulated part")
    parser.add_argument("--rounds", type=int, default=3, help="of the real part")
    parser.add_argument("--layers", type=int, default=8, help="of the real part's transformer")
    parser.add_argument("--sequence", type=int, default=128, help="of its tokens")
    parser.add_argument("--iterations", type=int, default=20, help="of its mode=profile")
    parser.add_argument("--quick", action="store_true", help="a few configurations only")
    given = parser.parse_args()
    shape = {**prediction_real.SHAPE, "layers": given.layers, "sequence": given.sequence}
    real = {"rounds": given.rounds, "shape": shape, "iterations": given.iterations}
    parts: dict[str, Callable[..., Iterator[tuple[Any, ...]]]] = {
        "emulated": partial(prediction_emulated.measure, num_ranks=given.ranks),
        "real": partial(prediction_real.measure, **real),
    }
    rows: list[Row] = []
    table = Table(*_HEADS)
    for part, measure in parts.items():
        if given.part in (None, part):
            for entry in measure(steps=given.steps, quick=given.quick):
                rows.append(Row(part, *entry))
                sys.stderr.write(f"{add(table, rows[-1])}\n")
    summaries = [summary(own) for p in parts if (own := [row for row in rows if row.part == p])]
    sys.stdout.write("\n".join([str(table), "", *summaries, ""]))


if __name__ == "__main__":
    main()
