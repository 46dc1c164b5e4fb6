"""Whether the planner's order of layouts is the measured one.

    OMP_NUM_THREADS=1 python -m benchmarks.plan_ranking [--steps 5] [--rounds 3]

Layouts of a small transformer (pp, dp, tp, schedule, microbatch size, recompute) on two ranks: no
more than cores, so compute is real. ``mode=profile profile.hardware=`` measures the machine first;
with that option of ``hardware=`` each layout is predicted as ``mode=plan`` does it, and those
that the planner itself lists first are among them. All are then run by the same two processes,
in turns, and the quietest of the rounds counts: a disturbance can only add. Printed: predicted and
measured step time and memory, Kendall's tau-b of the times, and by how much the layout predicted to
be fastest misses the fastest one. Other programs disturb it: run it alone, or before them
(``chrt -r 10 python ...``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from benchmarks.ranks import rank_pool
from benchmarks.table import Table, kendall_tau
from benchmarks.trained import OPTIMIZER, memory_error, profile, train
from launcher.config import LaunchConfig, from_dict
from launcher.planning.question import question
from launcher.planning.report import candidate_config
from launcher.report.predicted import predict
from launcher.resolve import Run, resolve
from strategies.analysis.memory import peak_saved
from strategies.costs.table import StageMemory
from strategies.planner.layout_search import search

RANKS = 2
BATCH = 16
SHAPE: Mapping[str, object] = {
    "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 768, "vocab": 512,
    "sequence": 128,
}  # fmt: skip
# Degrees and schedule; microbatch size; recompute.
LAYOUTS: tuple[tuple[dict[str, object], int, str], ...] = (
    ({"pp": 1, "schedule": {"name": "1f1b"}}, 1, "none"),
    ({"pp": 1, "schedule": {"name": "1f1b"}}, 4, "full"),
    ({"dp": 2}, 1, "none"),
    ({"dp": 2}, 8, "full"),
    ({"tp": 2}, 2, "none"),
    ({"tp": 2}, 8, "full"),
    ({"pp": 2, "schedule": {"name": "naive"}}, 1, "none"),
    ({"pp": 2, "schedule": {"name": "naive"}}, 4, "full"),
    ({"pp": 2, "schedule": {"name": "1f1b"}}, 1, "none"),
    ({"pp": 2, "schedule": {"name": "1f1b"}}, 1, "full"),
    ({"pp": 2, "schedule": {"name": "1f1b"}}, 4, "none"),
    ({"pp": 2, "schedule": {"name": "1f1b"}}, 8, "none"),
    ({"pp": 2, "schedule": {"name": "gpipe"}}, 8, "full"),
    ({"pp": 2, "schedule": {"name": "gpipe"}}, 16, "none"),
    ({"pp": 2, "schedule": {"name": "zb_v"}}, 2, "none"),
    ({"pp": 2, "schedule": {"name": "interleaved_1f1b", "stages_per_rank": 2}}, 4, "none"),
    ({"pp": 2, "schedule": {"name": "interleaved_1f1b", "stages_per_rank": 2}}, 8, "full"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One layout.

    Attributes:
        words: What it is.
        predicted_s: Step time.
        measured_s: Median step time of the quietest round.
        predicted_bytes: Per rank, weights, gradients, optimizer state, and what is held for
            backwards at the worst moment.
        measured_bytes: The same.
    """

    words: str
    predicted_s: float
    measured_s: float
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]

    @property
    def memory_error(self) -> float:
        """Of the rank that is worst predicted."""
        return memory_error(self.predicted_bytes, self.measured_bytes) or 0.0


def configurations(
    hardware: Mapping[str, Any], shape: Mapping[str, Any], *, layouts: int = len(LAYOUTS)
) -> list[LaunchConfig]:
    """The first ones of all layouts, and those that the planner puts first."""
    common = {"model": dict(shape), "optimizer": dict(OPTIMIZER), "hardware": hardware}
    found = [
        from_dict(
            {
                **common,
                **degrees,
                "mode": "validate",
                "data": {"global_batch_size": BATCH, "microbatch_size": size},
                "recompute": {"name": recompute},
            }
        )
        for degrees, size, recompute in LAYOUTS[:layouts]
    ]
    wanted = {"num_gpus": RANKS, "global_batch_size": BATCH}
    asked = question(from_dict({**common, "mode": "plan", "planner": wanted}), ())
    for plan in search(asked.problem, asked.space, top_k=3).plans:
        chosen = candidate_config(asked.config, plan.candidate, asked.shape, BATCH)
        config = replace(chosen, mode="validate")
        if config not in found:
            found.append(config)
    return found


def describe(config: LaunchConfig) -> str:
    """A layout in the words of the command line."""
    degrees = f"pp={config.pp} dp={config.dp} tp={config.tp}"
    return (
        f"{degrees} schedule={config.schedule.name} "
        f"data.microbatch_size={config.data.microbatch_size} recompute={config.recompute.name}"
        + (f" overlap={config.overlap.name}" if config.dp != 1 else "")
    )


def measure(configs: Sequence[LaunchConfig], steps: int, rounds: int) -> list[Row]:
    """Predicts and runs all layouts."""
    periods: list[list[float]] = [[] for _ in configs]
    held: list[tuple[int, ...]] = [() for _ in configs]
    with rank_pool(RANKS) as ranks:
        for number, config in list(enumerate(configs)) * rounds:
            found = train(ranks, config, steps)
            periods[number].append(max(rank.period_s for rank in found))
            # One rank of each stage: dp and tp come after pp.
            first = found[:: len(found) // config.pp]
            held[number] = tuple(rank.saved_bytes + rank.state_bytes for rank in first)
    rows = []
    for config, taken, measured in zip(configs, periods, held, strict=True):
        run = resolve(config)
        _, metrics = predict(run)
        memory = run.costs.table(run.programs.train).memory
        assert memory is not None
        predicted = _predicted_bytes(run, memory)
        rows.append(Row(describe(config), metrics.period, min(taken), predicted, measured))
    return rows


def _predicted_bytes(run: Run, memory: StageMemory) -> tuple[int, ...]:
    program = run.programs.train
    state = [
        memory.parameters[stage] + memory.gradients[stage] + memory.optimizer[stage]
        for stage in range(program.placement.num_stages)
    ]
    return tuple(
        saved + sum(state[stage] for stage in program.placement.stages_of(rank))
        for rank, saved in enumerate(peak_saved(program, memory))
    )


def table(rows: Sequence[Row]) -> str:
    """A line per layout, fastest prediction first, then the summary."""
    shown = Table("layout", "predicted ms", "measured ms", "memory", numbers=True)
    for row in sorted(rows, key=lambda row: row.predicted_s):
        milliseconds = (f"{1e3 * value:.1f}" for value in (row.predicted_s, row.measured_s))
        shown.add(row.words, *milliseconds, f"{row.memory_error:+.1%}")
    tau, regret = figures(rows)
    error = statistics.mean(abs(row.predicted_s / row.measured_s - 1.0) for row in rows)
    memory = max(abs(row.memory_error) for row in rows)
    return (
        f"{shown}\n\n"
        f"{len(rows)} layouts: Kendall tau {tau:.3f}; the chosen layout is {regret:.1%} off the "
        f"best measured; step time MAPE {error:.1%}; memory within {memory:.1%}\n"
    )


def figures(rows: Sequence[Row]) -> tuple[float, float]:
    """Kendall's tau, and what the layout predicted to be fastest takes beyond the fastest."""
    tau = kendall_tau([row.predicted_s for row in rows], [row.measured_s for row in rows])
    chosen = min(rows, key=lambda row: row.predicted_s)
    return tau, chosen.measured_s / min(row.measured_s for row in rows) - 1.0


def main() -> None:
    """Measures all layouts and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="of all layouts in turns")
    parser.add_argument("--layers", type=int, default=8, help="of the transformer")
    parser.add_argument("--sequence", type=int, default=128, help="of its tokens")
    parser.add_argument("--layouts", type=int, default=len(LAYOUTS), help="beside the planner's")
    parser.add_argument("--sizes", default="1,2,4,8", help="of microbatches, for mode=profile")
    parser.add_argument("--iterations", type=int, default=15, help="of mode=profile")
    parser.add_argument("--hardware", type=Path, help="an option of hardware= measured before")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = {**SHAPE, "layers": options.layers, "sequence": options.sequence}
    if options.hardware is not None:
        hardware = yaml.safe_load(options.hardware.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "hardware" / "here.yaml"
            profile(
                Path(folder), shape, ranks=RANKS, sizes=options.sizes,
                iterations=options.iterations, target=f"profile.hardware={target}",
            )  # fmt: skip
            hardware = yaml.safe_load(target.read_text())
    configs = configurations(hardware, shape, layouts=options.layouts)
    rows = measure(configs, options.steps, options.rounds)
    sys.stdout.write(table(rows))
    if options.json is not None:
        tau, regret = figures(rows)
        content = {"tau": tau, "regret": regret, "layouts": [row.words for row in rows]}
        options.json.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
