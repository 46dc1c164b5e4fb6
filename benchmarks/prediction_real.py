"""The real part of ``prediction``: a small transformer on 2 ranks, costs from ``mode=profile``."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import rank_pool
from launcher.config import LaunchConfig, dump, from_dict
from launcher.config.pipeline import CostsConfig, RecomputeConfig, ScheduleConfig
from launcher.config.workload import DataConfig, ModelConfig, OptimizerConfig
from launcher.planning.profile_check import write_refined
from launcher.resolve import Run, resolve
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.optimizer import build_optimizer
from strategies.analysis.memory import peak_saved
from strategies.analysis.timeline import Timeline
from strategies.models.unit_model import UnitModel
from strategies.plan import Options
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.step.recorder import gather_timeline
from strategies.simulator.engine import simulate

RANKS = 2
SIZES = (1, 4)  # that are measured; what lies between them is interpolated
SHAPE = {
    "layers": 8, "hidden": 192, "heads": 4, "kv_heads": 4, "ffn": 512, "vocab": 256,
    "sequence": 128,
}  # fmt: skip
_WARM_UPS = 3
# Every kind of instruction is in one of them; none of them is a case.
CALIBRATING = (("1f1b", "full", 4, 2), ("zb_v", "none", 4, 2))


def cases(*, quick: bool) -> Iterator[tuple[str, str, int, int]]:
    """(schedule, recompute, microbatches, microbatch size)."""
    if quick:
        yield from (("1f1b", "none", 4, 1), ("1f1b", "full", 4, 1), ("zb_v", "none", 4, 1))
        return
    for count, size in ((4, 1), (8, 1), (4, 2), (4, 4)):
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
            for recompute in ("none", "full", "mario"):
                if (schedule, recompute, count, size) not in CALIBRATING:
                    yield schedule, recompute, count, size
        for schedule in ("foldx_fifo", "zb_h1", "zb_v"):
            if (schedule, "none", count, size) not in CALIBRATING:
                yield schedule, "none", count, size


def measure(
    *, steps: int, quick: bool, rounds: int, shape: dict[str, int], iterations: int
) -> Iterator[tuple[str, float, float, float, float, tuple[int, ...], tuple[int, ...]]]:
    """Per case the name, and step time, compute, bytes per rank, each predicted and measured.

    A round measures the layers, corrects the profile by the calibrating runs, as ``costs.refine``
    does, and then runs all cases. How fast a machine is changes by the minute, and what disturbs it
    only makes it slower: of each figure the least of all rounds counts, predicted or measured.
    """
    all_cases = list(cases(quick=quick))
    seen: list[list[_Result]] = [[] for _ in all_cases]
    with tempfile.TemporaryDirectory() as folder, rank_pool(RANKS) as ranks:
        for number in range(1, rounds + 1):
            profile = Path(folder) / f"profile{number}.json"
            command = profile_command(profile, shape, iterations)
            subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)
            for case in CALIBRATING:
                config = configuration(*case, profile, shape)
                *_, timeline = ranks.run(run_steps, config=json.dumps(dump(config)), steps=steps)[0]
                write_refined(profile, resolve(config).costs, timeline)
            for case, results in zip(all_cases, seen, strict=True):
                config = configuration(*case, profile, shape)
                found = ranks.run(run_steps, config=json.dumps(dump(config)), steps=steps)
                results.append(_result(config, found))
            sys.stderr.write(f"round {number} of {rounds} is done\n")
    for (schedule, recompute, count, size), results in zip(all_cases, seen, strict=True):
        last = results[-1]
        figures = zip(*(result.seconds for result in results), strict=True)
        period, measured_s, busy, measured_busy_s = map(min, figures)
        yield (
            f"{schedule}, {recompute}, {count} x {size}",
            period,
            measured_s,
            busy,
            measured_busy_s,
            last.saved_bytes,
            last.measured_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Result:
    """Of one case in one round.

    Attributes:
        seconds: Step time predicted and measured, compute of all ranks predicted and measured.
        saved_bytes: Per rank, predicted.
        measured_bytes: The same.
    """

    seconds: tuple[float, float, float, float]
    saved_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]


def _result(
    config: LaunchConfig, found: list[tuple[list[float], float, int, Timeline | None]]
) -> _Result:
    run = resolve(config)
    program = run.programs.train
    memory = run.costs.table(program).memory
    assert memory is not None
    timeline = simulate(program, run.costs)
    # Nobody waits at the flush: what counts is the time from step to step.
    times = [[b - a for a, b in pairwise(ends)] for ends, *_ in found]
    return _Result(
        (
            timeline.period,
            max(map(statistics.median, times)),
            sum(map(timeline.busy, range(RANKS))),
            sum(busy for _, busy, *_ in found),
        ),
        peak_saved(program, memory),
        tuple(peak for _, _, peak, _ in found),
    )


def profile_command(target: Path, shape: dict[str, int], iterations: int) -> list[str]:
    """Measures the model's layers as a user does."""
    return [
        sys.executable, "-m", "launcher", "mode=profile", f"pp={RANKS}",
        *(f"model.{name}={value}" for name, value in shape.items()),
        f"profile.microbatch_sizes={list(SIZES)}".replace(" ", ""),
        f"profile.iterations={iterations}",
        f"profile.file={target}", f"hydra.run.dir={target.parent / 'run'}",
    ]  # fmt: skip


def configuration(
    schedule: str, recompute: str, count: int, size: int, profile: Path, shape: dict[str, int]
) -> LaunchConfig:
    """What a user types for one case."""
    virtual = schedule in ("interleaved_1f1b", "foldx_fifo")
    return LaunchConfig(
        mode="validate",
        pp=RANKS,
        num_microbatches=count,
        schedule=ScheduleConfig(name=schedule, stages_per_rank=2 if virtual else None),
        recompute=RecomputeConfig(name=recompute),  # type: ignore[arg-type]
        costs=CostsConfig(name="profiled", file=str(profile)),
        model=ModelConfig(**shape),  # type: ignore[arg-type]
        data=DataConfig(microbatch_size=size),
        # As conf/optimizer/adamw.yaml has it, which the profile was made with.
        optimizer=OptimizerConfig(name="adamw", betas=(0.9, 0.95), eps=1e-8),
    )


def run_steps(*, config: str, steps: int) -> tuple[list[float], float, int, Timeline | None]:
    """One case: end of each step on this rank, its compute, most bytes saved, all ranks' times."""
    run = resolve(from_dict(json.loads(config)))
    engine = _engine(run)
    optimizer = build_optimizer(engine.updated_parameters(), run.config.optimizer)
    batch = _batch(run)
    ends = []
    dist.barrier()
    for step in range(_WARM_UPS + steps):
        _step(engine, optimizer, batch, step)
        ends.append(time.perf_counter())
    records = list(engine.recorder.kept)[_WARM_UPS:]
    busy = statistics.median(engine.recorder.spans(record).busy for record in records)
    timeline = gather_timeline(engine, median=True)
    activations = engine.measure_activations()
    _step(engine, optimizer, batch, 0)
    peak = activations.peak
    dist.barrier()
    engine.close()
    del engine, optimizer
    gc.collect()  # The next case finds the memory that this one leaves.
    return ends[_WARM_UPS:], busy, peak, timeline


def _engine(run: Run) -> Engine:
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
        coordinates=Coordinates(RANKS, 1, dist.get_rank(), 0),
        device=torch.device("cpu"),
    )
    engine.build_gradients()
    return engine


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
