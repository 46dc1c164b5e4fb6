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
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]

from benchmarks.ranks import rank_pool
from launcher.config import LaunchConfig, dump, from_dict
from launcher.planning.question import question
from launcher.planning.report import candidate_config
from launcher.report.predicted import predict
from launcher.resolve import Run, resolve
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.optimizer import build_optimizer
from strategies.analysis.memory import peak_saved
from strategies.costs.table import StageMemory
from strategies.models.unit_model import UnitModel
from strategies.plan import Options
from strategies.planner.layout_search import search
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.messages.mesh import Coordinates

RANKS = 2
BATCH = 16
SHAPE: dict[str, object] = {
    "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 768, "vocab": 512,
    "sequence": 128,
}  # fmt: skip
# As conf/optimizer/adamw.yaml has it, which the profile is made with.
OPTIMIZER: dict[str, object] = {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8}
_WARM_UPS = 2

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
        pairs = zip(self.predicted_bytes, self.measured_bytes, strict=True)
        return max((p / m - 1.0 for p, m in pairs if m), key=abs, default=0.0)


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


def measured_hardware(
    folder: Path, shape: dict[str, object], sizes: str, iterations: int
) -> dict[str, object]:
    """What ``mode=profile`` says of this machine."""
    target = folder / "hardware" / "here.yaml"
    subprocess.run(
        [
            sys.executable, "-m", "launcher", "mode=profile", f"pp={RANKS}",
            *(f"model.{name}={value}" for name, value in shape.items()),
            f"profile.microbatch_sizes=[{sizes}]", f"profile.iterations={iterations}",
            f"profile.hardware={target}", f"hydra.run.dir={folder / 'run'}",
        ],
        check=True,
        cwd=folder,
        stdout=sys.stderr,
    )  # fmt: skip
    found: dict[str, object] = yaml.safe_load(target.read_text())
    return found


def configurations(
    hardware: dict[str, object], shape: dict[str, object], *, layouts: int = len(LAYOUTS)
) -> list[LaunchConfig]:
    """The first ones of all layouts, and those that the planner puts first."""
    common = {"model": shape, "optimizer": OPTIMIZER, "hardware": hardware}
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


def run_steps(*, config: str, steps: int) -> tuple[list[float], int] | None:
    """(end of each step on this rank, most bytes that it held); None on a rank too many."""
    run = resolve(from_dict(json.loads(config)))
    rank = dist.get_rank()
    if rank >= run.world_size:
        return None
    with torch.device("meta"):
        module = LanguageModel(run.shape, seed=run.config.seed)  # type: ignore[arg-type]
    engine = Engine(
        model=UnitModel(module),
        plan=run.plan,
        options=Options(
            units_per_stage=tuple(map(len, run.stages)),
            backend="shared",
            check_batches=False,
            on_nan="ignore",
        ),
        coordinates=Coordinates.of(rank, pp=run.config.pp, dp=run.dp, tp=run.config.tp),
        device=torch.device("cpu"),
    )
    engine.build_gradients()
    optimizer = build_optimizer(engine.updated_parameters(), run.config.optimizer)
    batch = _batch(run)
    ends = []
    for step in range(_WARM_UPS + steps):
        _step(engine, optimizer, batch, step)
        ends.append(time.perf_counter())
    activations = engine.measure_activations()
    _step(engine, optimizer, batch, 0)
    peak = activations.peak + _state_bytes(engine, optimizer)
    engine.close()
    return ends[_WARM_UPS:], peak


def _state_bytes(engine: Engine, optimizer: Any) -> int:
    """Weights, gradients and optimizer state on this rank, each storage once."""
    engine.restore_gradients()
    weights = list(engine.model.module.parameters())
    moments = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    held = [*weights, *(w.grad for w in weights if w.grad is not None), *moments]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


def _batch(run: Run) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = (run.batch_size, run.shape.sequence + 1)
    tokens = torch.randint(run.shape.vocab, rows, generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def _step(engine: Engine, optimizer: Any, batch: dict[str, torch.Tensor], step: int) -> None:
    engine.train_pass(batch, batch_idx=step, step=step, accumulation=1, update=True)
    engine.restore_gradients()
    engine.flush()
    optimizer.step()
    engine.stepped()


def measure(configs: Sequence[LaunchConfig], steps: int, rounds: int) -> list[Row]:
    """Predicts and runs all layouts."""
    periods: list[list[float]] = [[] for _ in configs]
    peaks: list[dict[int, int]] = [{} for _ in configs]
    with rank_pool(RANKS) as ranks:
        for number, config in list(enumerate(configs)) * rounds:
            answers = ranks.run(run_steps, config=json.dumps(dump(config)), steps=steps)
            found = [answer for answer in answers if answer is not None]
            times = [[b - a for a, b in pairwise(ends)] for ends, _ in found]
            periods[number].append(max(statistics.median(each) for each in times))
            share = len(found) // config.pp
            peaks[number] = {r: found[r * share][1] for r in range(config.pp)}
    rows = []
    for number, config in enumerate(configs):
        run = resolve(config)
        _, metrics = predict(run)
        memory = run.costs.table(run.programs.train).memory
        assert memory is not None
        rows.append(
            Row(
                describe(config),
                metrics.period,
                min(periods[number]),
                _predicted_bytes(run, memory),
                tuple(peaks[number].values()),
            )
        )
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
    lines = [f"{'predicted':>12} {'measured':>12} {'memory':>7}  layout"]
    for row in sorted(rows, key=lambda row: row.predicted_s):
        lines.append(
            f"{row.predicted_s * 1e3:9.1f} ms {row.measured_s * 1e3:9.1f} ms "
            f"{row.memory_error:+7.1%}  {row.words}"
        )
    tau, regret = figures(rows)
    error = statistics.mean(abs(row.predicted_s / row.measured_s - 1.0) for row in rows)
    memory = max(abs(row.memory_error) for row in rows)
    lines.append(
        f"{len(rows)} layouts: Kendall tau {tau:.3f}; the chosen layout is {regret:.1%} off the "
        f"best measured; step time MAPE {error:.1%}; memory within {memory:.1%}"
    )
    return "\n".join(lines)


def figures(rows: Sequence[Row]) -> tuple[float, float]:
    """Kendall's tau, and what the layout predicted to be fastest takes beyond the fastest."""
    tau = kendall_tau([(row.predicted_s, row.measured_s) for row in rows])
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
            hardware = measured_hardware(Path(folder), shape, options.sizes, options.iterations)
    configs = configurations(hardware, shape, layouts=options.layouts)
    rows = measure(configs, options.steps, options.rounds)
    sys.stdout.write(table(rows) + "\n")
    if options.json is not None:
        tau, regret = figures(rows)
        content = {"tau": tau, "regret": regret, "layouts": [row.words for row in rows]}
        options.json.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
