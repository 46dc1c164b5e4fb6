"""``hardware=auto``: figures of this machine, measured before its first training, and kept.

Ranks of a small reference model run for about a second, as many at once as the machine has cores or
GPUs for: layers, large products, and the link between two of them. What they find is kept in the
user's cache, for this machine and this number of ranks. Trainings measure where nothing is kept;
``simulate``, ``validate`` and ``plan`` take what there is, else an assumption, and never measure.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from launcher.commands.ranks import check_before_start, check_world, fork_server
from launcher.config import LaunchConfig
from launcher.config.check import check_range
from launcher.config.decode import brings_own, decode
from launcher.config.key import keys_of
from launcher.config.pipeline import ASSUMED, AUTO, QUICK, HardwareConfig
from launcher.planning.hardware_fit import hardware_values
from launcher.planning.profile_check import fingerprint, rank_threads, this_machine
from launcher.planning.question import planned_gpus
from launcher.planning.reference import reference
from launcher.processes.local import (
    LocalRanks,
    own_folder,
    rank_environment,
    take_outcome,
    user_cache,
)
from launcher.processes.task import rewrite_task, write_task
from launcher.report.result import write_atomically
from launcher.resolve import element_sizes, num_cores, num_gpus, num_replicas, resolve, uses_gpu
from launcher.terminal import say
from launcher.workloads.model_share import ModelShape
from strategies.costs.profile_file import parse_profile
from strategies.errors import PipelineError
from strategies.small_file import FileRefusedError, read_json

# A file with figures that are taken on every machine, for predictions that do not depend on it.
VARIABLE = "FOLDPIPE_CALIBRATION"
_MODES = ("train", "simulate", "validate", "plan")
_MOST_BYTES = 1 << 20


class _UnmeasuredError(Exception):
    """Why there are no figures of this machine."""


def with_figures(config: LaunchConfig, run_dir: Path) -> LaunchConfig:
    """The configuration with figures in place of ``hardware=auto``; keys that were set stay."""
    if config.hardware.name != AUTO:
        return config
    figures = HardwareConfig(name=ASSUMED)
    if config.mode in _MODES and _in_seconds(config):
        try:
            figures = _figures(config, run_dir)
        except _UnmeasuredError as why:
            say(f"hardware=auto: {why}; predicted for hardware={ASSUMED}")
    default = HardwareConfig()
    kept = {
        entry.name: value
        for entry in fields(HardwareConfig)
        if (value := getattr(config.hardware, entry.name)) != getattr(default, entry.name)
    }
    return replace(config, hardware=replace(figures, **kept))


def _in_seconds(config: LaunchConfig) -> bool:
    """Whether a prediction needs the machine's figures."""
    unknown = brings_own("model", config.model.name) and not _plans(config)
    return config.costs.name == "analytic" and not unknown


def _plans(config: LaunchConfig) -> bool:
    return config.mode == "plan" or config.plan == "auto"


def _figures(config: LaunchConfig, run_dir: Path) -> HardwareConfig:
    given = os.environ.get(VARIABLE)
    if given:
        found = _read(Path(given), None)
        if found is None:
            raise _UnmeasuredError(f"{VARIABLE}={given} has no figures of a machine")
        return found
    here = config.cluster.name == "local" and config.cluster.nodes == 1
    if not here:
        raise _UnmeasuredError("ranks run on other machines, or are started elsewhere")
    if _plans(config):
        ranks = planned_gpus(config, run_dir)
    else:
        ranks = config.pp * num_replicas(config) * config.tp
    facts = _facts(config, ranks)
    folder = own_folder("hardware")
    if folder is None:
        raise _UnmeasuredError(f"{user_cache()} cannot be written")
    file = Path(folder) / f"{fingerprint(facts)}.json"
    found = _read(file, facts)
    if found is not None:
        return found
    if config.mode != "train":
        raise _UnmeasuredError(f"no training with {_count(ranks)} has measured this machine yet")
    if not _plans(config):
        check_world(config)
        check_before_start(resolve(config), None)  # What is refused starts nothing.
    try:
        with _alone(file.with_suffix(".lock")):
            found = _read(file, facts)  # of another job of a sweep, meanwhile
            if found is None:
                say(f"hardware=auto: measuring this machine, once for {_count(ranks)}")
                found = _measured(config, ranks)
                content = {"machine": facts, "hardware": asdict(found)}
                write_atomically(file, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise _UnmeasuredError(f"{file.parent} cannot be written ({error.strerror})") from error
    return found


def _count(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def _facts(config: LaunchConfig, ranks: int) -> dict[str, object]:
    """All that decides what is measured."""
    gpu = uses_gpu(config)
    return {
        "host": socket.gethostname(),
        **asdict(this_machine(ranks=ranks, gpu=gpu)),
        "usable": num_gpus() if gpu else num_cores(),
        "ranks": ranks,
        "precision": config.trainer.precision,
        "float32_matmul_precision": config.trainer.float32_matmul_precision,
        "backend": config.cluster.backend,
    }


def _read(file: Path, facts: Mapping[str, object] | None) -> HardwareConfig | None:
    """Figures in a file, if it is of these facts and every one is in its range."""
    try:
        content = read_json(file, most_bytes=_MOST_BYTES)
        if facts is not None and content["machine"] != facts:
            return None
        return _decoded(content["hardware"])
    except (OSError, ValueError, FileRefusedError, PipelineError, KeyError, TypeError):
        return None


def _decoded(values: Mapping[str, Any]) -> HardwareConfig:
    found = decode(values, HardwareConfig, "hardware.")
    for entry in keys_of(HardwareConfig, "hardware."):
        check_range(entry, getattr(found, entry.path.removeprefix("hardware.")))
    return found


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Jobs of a sweep that run side by side measure one after the other, so once."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _measured(config: LaunchConfig, ranks: int) -> HardwareConfig:
    gpu = uses_gpu(config)
    threads = rank_threads(ranks)
    room = num_gpus() if gpu else max(1, num_cores() // threads)
    # A link needs two; more ranks than cores take turns in the simulator, not here.
    world = min(ranks, max(2, room))
    run = resolve(reference(config, world))
    environment = rank_environment(world, threads)
    try:
        with tempfile.TemporaryDirectory(prefix="foldpipe-calibration-") as name:
            folder = Path(name)
            rewrite_task(folder, write_task(run, folder, None) | {"job": "calibration"})
            server = fork_server(config, environment)
            if server is not None:
                server.load(["launcher.rank.jobs", "omegaconf", "launcher.rank.profile_job"])
            LocalRanks(folder, world, lambda _: None, environment, server=server).run()
            outcome = take_outcome(folder)
            values = _values(run.config, outcome, run.shape, ranks=ranks)
        values["cores"] = None if gpu else room
        return _decoded(values)
    except (PipelineError, OSError) as error:
        said = str(error).splitlines()[0]
        raise _UnmeasuredError(f"this machine could not be measured ({said})") from error


def _values(
    config: LaunchConfig, outcome: Mapping[str, Any], shape: ModelShape, *, ranks: int
) -> dict[str, Any]:
    import psutil

    memory = outcome["memory_bytes"] or psutil.virtual_memory().total / ranks
    values = hardware_values(
        QUICK,
        parse_profile(str(outcome["profile"]), label="calibration"),
        config,
        shape,
        element_sizes(config),
        memory,
        peak=outcome["product_flops"],
    )
    # Sending and receiving keep a core from what else would run on it: time of stages, not links.
    end_s = outcome["end_s"]
    values["stage_overhead_s"] += end_s
    values["intra_latency_s"] = max(0.0, values["intra_latency_s"] - 2 * end_s)
    return values
