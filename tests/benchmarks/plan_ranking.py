"""Whether the planner's order of layouts is the measured one.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.plan_ranking [--steps 12] [--json FILE]

Layouts of one small transformer on two ranks (pp, dp, tp, schedule, microbatch size, recompute),
each predicted by ``mode=simulate`` costs and trained by the launcher; no more ranks than cores, so
compute is real. Printed: predicted and measured step time, Kendall's tau-b between them, and by how
much the layout predicted to be fastest misses the fastest one. ``hardware=cpu_laptop`` scales all
predictions alike, so its peak does not matter to the order, only the ratio of links to compute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

MODEL = (
    "model.layers=8", "model.hidden=256", "model.heads=4", "model.kv_heads=4", "model.ffn=768",
    "model.vocab=512", "model.sequence=128", "data.global_batch_size=16",
)  # fmt: skip

LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("pp=1", "schedule=1f1b"),
    ("pp=1", "schedule=1f1b", "recompute=full"),
    ("dp=2",),
    ("tp=2",),
    ("pp=2", "schedule=naive"),
    ("pp=2", "schedule=1f1b"),
    ("pp=2", "schedule=1f1b", "recompute=full"),
    ("pp=2", "schedule=1f1b", "data.microbatch_size=4"),
    ("pp=2", "schedule=1f1b", "data.microbatch_size=8"),
    ("pp=2", "schedule=gpipe", "data.microbatch_size=8", "recompute=full"),
    ("pp=2", "schedule=gpipe", "data.microbatch_size=16"),
    ("pp=2", "schedule=zb_v", "data.microbatch_size=2"),
    ("pp=2", "schedule=interleaved_1f1b", "data.microbatch_size=4"),
    ("pp=2", "schedule=naive", "recompute=full"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One layout.

    Attributes:
        words: Its overrides.
        predicted_s: Step time.
        measured_s: Median step time.
    """

    words: tuple[str, ...]
    predicted_s: float
    measured_s: float


def measure(words: Sequence[str], steps: int) -> Row:
    """Trains one layout in a process tree of its own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable, "-m", "launcher", *MODEL, *words, f"trainer.max_steps={steps}",
                "trainer.limit_val_batches=0", "trainer.save_last=false", "tracking=none",
                "trainer.enable_progress_bar=false", f"hydra.run.dir={folder}/run",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        result = json.loads((Path(folder) / "run" / "result.json").read_text())
    return Row(tuple(words), result["predicted_step_time_s"], result["step_time_s"])


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Tau-b: pairs in the same order minus pairs in the other, ties taken out of both sides.

    >>> kendall_tau([(1, 1), (2, 3), (3, 2)])
    0.3333333333333333
    """
    agree = first_ties = second_ties = 0
    both = list(combinations(pairs, 2))
    for (a, b), (c, d) in both:
        x, y = (a > c) - (a < c), (b > d) - (b < d)
        agree += x * y
        first_ties += x == 0
        second_ties += y == 0
    scale = ((len(both) - first_ties) * (len(both) - second_ties)) ** 0.5
    return agree / scale if scale else 0.0


def main() -> None:
    """Measures all layouts and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(words, options.steps) for words in LAYOUTS]
    tau = kendall_tau([(row.predicted_s, row.measured_s) for row in rows])
    chosen = min(rows, key=lambda row: row.predicted_s)
    regret = chosen.measured_s / min(row.measured_s for row in rows) - 1.0
    lines = [f"{'predicted':>12} {'measured':>12}  layout"]
    for row in sorted(rows, key=lambda row: row.predicted_s):
        lines.append(
            f"{row.predicted_s * 1e3:9.1f} ms {row.measured_s * 1e3:9.1f} ms  {' '.join(row.words)}"
        )
    lines.append(f"Kendall tau {tau:.3f}; the chosen layout is {regret:.1%} off the best measured")
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json is not None:
        figures = {"tau": tau, "regret": regret, "layouts": [list(r.words) for r in rows]}
        options.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
