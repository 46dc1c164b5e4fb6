"""The tiny model with experts beside its dense twin, which computes equally much per token.

    python -m benchmarks.dense_twin [steps]

Both train on the default data with the same seed, batches and rate, at pp=2. What is printed are
training and validation losses as they fall, and how evenly the experts are used. With many steps
experts win, as they hold three times the weights; in few steps no expert has seen much.
"""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.table import Table

NAMES = ("tiny", "tiny_moe")


def train(name: str, steps: int, folder: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Rows of metrics.csv and result.json of one training."""
    words = [
        f"model={name}", "pp=2", f"trainer.max_steps={steps}", f"hydra.run.dir={folder}",
        f"trainer.val_check_interval={max(1, steps // 4)}", "trainer.limit_val_batches=8",
        "data.global_batch_size=8", "data.microbatch_size=4", "optimizer.lr=3e-3",
    ]  # fmt: skip
    command = [sys.executable, "-m", "launcher", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with (folder / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    return rows, json.loads((folder / "result.json").read_text())


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 120
    found: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            rows, result = train(name, steps, Path(folder) / "run")
        found[name] = {
            "parameters": result["num_parameters"],
            "active": result["num_active_parameters"],
            "flops": result["model_flops_per_step"],
            "losses": [float(row["train_loss"]) for row in rows if row["train_loss"]],
            "validation": [float(row["val_loss"]) for row in rows if row["val_loss"]],
            "imbalance": [float(row["expert_imbalance"]) for row in rows[-10:]]
            if "expert_imbalance" in rows[-1]
            else [],
        }
    table = Table(
        "model", "parameters", "active", "FLOPs per step", "first loss", "mean of the last ten",
        "validation, as it fell",
    )  # fmt: skip
    for name, each in found.items():
        table.add(
            name,
            f"{each['parameters']:,}",
            f"{each['active']:,}",
            f"{each['flops']:.3g}",
            f"{each['losses'][0]:.3f}",
            f"{statistics.mean(each['losses'][-10:]):.3f}",
            " ".join(f"{loss:.3f}" for loss in each["validation"]),
        )
    uneven = statistics.mean(found["tiny_moe"]["imbalance"])
    sys.stdout.write(
        f"{steps} steps of 8 sequences of 128 bytes\n\n{table}\n\n"
        f"fullest expert over the mean, last steps: {uneven:.2f}\n"
    )


if __name__ == "__main__":
    main()
