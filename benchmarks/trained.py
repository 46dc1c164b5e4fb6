"""A small transformer that ranks train as a request says, and what ``mode=profile`` says of it."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engine import steady
from benchmarks.runtime import Ours
from launcher.config import LaunchConfig, dump, from_dict
from launcher.resolve import Run, resolve
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.optimizer import build_optimizer
from strategies.analysis.timeline import Timeline
from strategies.models.unit_model import UnitModel
from strategies.plan import Options
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.step.recorder import gather_timeline
from tests.ranks.pool import Ranks

# As conf/optimizer/adamw.yaml has it, which profiles are made with.
OPTIMIZER: Mapping[str, object] = {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8}
_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Trained:
    """One rank's steps.

    Attributes:
        period_s: Median from step to step.
        busy_s: Its compute in a step.
        saved_bytes: What is held for backwards at the worst moment.
        state_bytes: Weights, gradients and optimizer state.
        timeline: All ranks' median times, if they were asked for.
    """

    period_s: float
    busy_s: float
    saved_bytes: int
    state_bytes: int
    timeline: Timeline | None


def train(
    ranks: Ranks, config: LaunchConfig, steps: int, *, timeline: bool = False
) -> list[Trained]:
    """Of each rank that takes part."""
    text = json.dumps(dump(config))
    found = ranks.run(_train, config=text, steps=steps, timeline=timeline)
    return [rank for rank in found if rank is not None]


def _train(*, config: str, steps: int, timeline: bool) -> Trained | None:
    run = resolve(from_dict(json.loads(config)))
    if dist.get_rank() >= run.world_size:
        dist.barrier()
        return None
    ours = _ours(run)
    ours.setup()
    ended = steady(ours, warmups=_WARM_UPS, steps=steps)
    busy_s, engine = ours.busy_s(steps), ours.rank_engine
    times = gather_timeline(engine, median=True) if timeline else None
    activations = engine.measure_activations()
    ours.step()
    found = Trained(
        statistics.median(after - before for before, after in pairwise(ended)),
        busy_s, activations.peak, _state_bytes(ours), times,
    )  # fmt: skip
    dist.barrier()
    ours.close()
    del ours, engine
    gc.collect()  # The next run finds the memory that this one leaves.
    return found


def _ours(run: Run) -> Ours:
    with torch.device("meta"):
        module = LanguageModel(run.shape, seed=run.config.seed)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    rows = (run.batch_size, run.shape.sequence + 1)
    tokens = torch.randint(run.shape.vocab, rows, generator=generator)
    config, units = run.config, tuple(map(len, run.stages))
    return Ours(
        UnitModel(module),
        run.plan,
        {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()},
        options=Options(
            units_per_stage=units, backend="shared", check_batches=False, on_nan="ignore"
        ),
        where=Coordinates.of(dist.get_rank(), pp=config.pp, dp=run.dp, tp=config.tp),
        optimizer=partial(build_optimizer, options=config.optimizer),
    )


def _state_bytes(ours: Ours) -> int:
    """Each storage once."""
    engine, optimizer = ours.rank_engine, ours.optimizer
    assert optimizer is not None
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


def profile(
    folder: Path, shape: Mapping[str, Any], *, ranks: int, sizes: str, iterations: int, target: str
) -> None:
    """Measures the model's layers as a user does; ``target`` is a key and its file."""
    words = [
        "mode=profile", f"pp={ranks}", *(f"model.{name}={value}" for name, value in shape.items()),
        f"profile.microbatch_sizes=[{sizes}]", f"profile.iterations={iterations}", target,
        f"hydra.run.dir={folder / 'run'}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "launcher", *words]
    subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)


def memory_error(predicted: Sequence[int], measured: Sequence[int]) -> float | None:
    """Of the rank that is worst predicted; None where nothing is measured."""
    pairs = zip(predicted, measured, strict=True)
    return max((p / m - 1.0 for p, m in pairs if m), key=abs, default=None)
