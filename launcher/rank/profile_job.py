"""``mode=profile`` on one rank: measures the layers of the configured model and the links.

Ranks come in replicas of ``tp``; two of them measure side by side where the machine has room, so
that each finds memory and cores as busy as training makes them, and then the link between them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from launcher.planning.profile_check import (
    class_numbers,
    classes_of,
    measured_sizes,
    model_facts,
    this_machine,
)
from launcher.processes.local import write_outcome
from launcher.processes.task import resolve_task
from launcher.rank.link_probe import product_flops
from launcher.rank.loop_time import measure_loop
from launcher.resolve import Run, uses_gpu
from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.model_share import model_units
from launcher.workloads.optimizer import build_optimizer
from launcher.workloads.registry import MODELS, load
from strategies.costs.profile_file import (
    Profile,
    Seconds,
    SizeProfile,
    UnitProfile,
    dump_profile,
)
from strategies.plan import NO_RECOMPUTE, Backend
from strategies.profiling.layer_times import Task, choose_units, draw_quickly, measure_layers
from strategies.profiling.link_times import Links, measure_links, measure_lockstep
from strategies.profiling.sample import sample_units
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.joining import gpu_backend, join, ranks_gpus
from strategies.runtime.messages.mesh import Coordinates

_TIME_S = 45.0  # for all training steps together; starting up and memory come on top
_MOST_S = 60  # that a quick measurement may take before the kernel ends it
_TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

Found = tuple[dict[int, SizeProfile], float]


def run(task: dict[str, Any], run_dir: Path) -> None:
    """The quick form, for ``hardware=auto``: layers of a small model, a product, a link."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_MOST_S)
    resolved = resolve_task(task)
    torch.set_float32_matmul_precision(resolved.config.trainer.float32_matmul_precision)
    outcome = measure(resolved, quick=True)
    if os.environ["RANK"] == "0":
        write_outcome(run_dir, outcome, stopped_by=None)


def measure(run: Run, *, quick: bool = False) -> dict[str, Any]:
    """Measures on every rank; returns the file's content, equal on all."""
    config = run.config
    world, rank = run.world_size, int(os.environ["RANK"])
    gpu = uses_gpu(config) and torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend: Backend = config.cluster.backend
    if backend == "auto":
        backend = "nccl" if gpu else "shared"
    # On a GPU the host runs ahead: what it does beside is hidden, or in the layers' own figures.
    loop_s = None if gpu else measure_loop(config, world)
    if world > 1 and not dist.is_initialized():
        patience_s = max(config.cluster.timeout_s, 600.0)
        store, _ = join(
            rank=rank,
            world_size=world,
            address=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            timeout_s=patience_s,
        )
        if gpu and config.cluster.backend == "auto":
            gpus = ranks_gpus(store, device, rank=rank, world_size=world)
            backend = gpu_backend(gpus, rank=rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=patience_s),
        )
    product = product_flops(device, _computed_in(run)) if quick else None
    found = _layers(run, device, backend, world=world, rank=rank, quick=quick)
    links: Links | None = None
    lost: float | None = None
    if world > config.tp:
        links = measure_links(0, config.tp, backend=backend, device=device, quick=quick)
        if not quick:
            lost = measure_lockstep(0, config.tp, backend=backend, device=device)
    gathered = everybody().everyone((found, links, lost, product, loop_s))
    profile = _profile(run, [entry[0] for entry in gathered if entry[0]], gathered[0][1], gpu=gpu)
    profile = replace(profile, lockstep_loss=gathered[0][2] or 0.0)
    if loop_s is not None:
        profile = replace(profile, rest_s=sum(entry[4] for entry in gathered) / len(gathered))
    measured: dict[str, Any] = {"profile": dump_profile(profile), "world_size": world}
    if quick:
        measured["product_flops"] = sum(entry[3] for entry in gathered) / len(gathered)
        measured["end_s"] = 0.0 if gpu or links is None else links.end_s
        measured["memory_bytes"] = torch.cuda.mem_get_info(device)[1] if gpu else None
    return measured


def _computed_in(run: Run) -> torch.dtype:
    precision = run.config.trainer.precision
    return _TYPES.get(precision) or _MIXED.get(precision) or torch.float32


def _layers(
    run: Run, device: torch.device, backend: Backend, *, world: int, rank: int, quick: bool
) -> Found | None:
    config, tp = run.config, run.config.tp
    numbers = class_numbers(run.shape)
    sample = sample_units(numbers, [unit.parameters for unit in model_units(run.shape)])
    sizes = measured_sizes(config)
    dtype = _MIXED.get(config.trainer.precision)
    autocast: Any = (
        nullcontext if dtype is None else partial(torch.autocast, device.type, dtype=dtype)
    )
    task = Task(
        make=partial(_module, run, sample.units, device),
        sample=sample,
        classes=tuple(numbers[unit] for unit in sample.units),
        batch=partial(_batch, run, device),
        # Embeddings and head are known by a side of the vocabulary's size.
        optimizer=partial(
            build_optimizer, options=config.optimizer, apart=lambda p: run.shape.vocab in p.shape
        ),
        sizes=sizes,
        iterations=config.profile.iterations,
        limit_s=_TIME_S / (3 * len(sizes)),
        device=device,
        options=replace(run.options, backend=backend),
        coordinates=Coordinates.of(rank, pp=1, dp=world // tp, tp=tp) if tp > 1
        else Coordinates(1, 1, 0, 0),
        recompute=run.plan.recompute if run.plan.recompute.policy == "selective" else NO_RECOMPUTE,
        autocast=autocast,
        times_only=quick,
    )  # fmt: skip
    # Replicas that would share cores take turns.
    cores = os.cpu_count() or 1
    turns = 1 if device.type == "cuda" or cores >= world * torch.get_num_threads() else world
    found = None
    for turn in range(turns):
        if turns == 1 or turn == rank:
            found = measure_layers(task)
        if world > 1:
            dist.barrier()
    return found


def _module(run: Run, units: Sequence[int], device: torch.device) -> nn.Module:
    """The model with the sample's units alone, on meta; silent about its losses."""
    config = run.config
    if isinstance(run.shape, HfShape):
        module = cast(pl.LightningModule, load(MODELS, config.model.name)(config))
    else:
        with torch.device("meta"):
            module = LanguageModel(run.shape, seed=config.seed)
        draw_quickly(module, device, module.net.tie)
    dtype = _TYPES.get(config.trainer.precision)
    if dtype is not None:
        module.to(dtype)
    module.train()
    return choose_units(module, units)


def _batch(run: Run, device: torch.device, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(run.config.seed)
    tokens = torch.randint(run.shape.vocab, (rows, run.shape.sequence + 1), generator=generator)
    tokens = tokens.to(device)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def _profile(run: Run, found: Sequence[Found], links: Links | None, *, gpu: bool) -> Profile:
    """The mean over all ranks that have measured."""
    sizes = tuple(
        (size, _mean_size([figures[size] for figures, _ in found]))
        for size in measured_sizes(run.config)
    )
    return Profile(
        machine=this_machine(ranks=run.world_size, gpu=gpu),
        model=model_facts(run.config, run.shape),
        classes=tuple(dict.fromkeys(classes_of(run.shape))),
        sizes=sizes,
        rest_s=sum(rest for _, rest in found) / len(found),
        messages=None if links is None else links.messages,
        reductions=None if links is None else links.reductions,
    )


def _mean_size(parts: Sequence[SizeProfile]) -> SizeProfile:
    units: list[UnitProfile] = []
    for same in zip(*(part.units for part in parts), strict=True):
        units.append(replace(same[0], seconds=_mean([unit.seconds for unit in same])))
    errors = [part.error for part in parts if part.error is not None]
    error = sum(errors) / len(errors) if errors else None
    return SizeProfile(_mean([part.fixed for part in parts]), tuple(units), error)


def _mean(parts: Sequence[Seconds]) -> Seconds:
    names = [entry.name for entry in fields(Seconds)]
    return Seconds(*(sum(getattr(part, name) for part in parts) / len(parts) for name in names))
