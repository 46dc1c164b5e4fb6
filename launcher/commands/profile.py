"""``mode=profile``: measures layers and links here, and writes what ``costs=profiled`` reads."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.commands.ranks import check_devices, failure_recorded, run_ranks
from launcher.config import LaunchConfig
from launcher.planning.hardware_fit import hardware_file, hardware_yaml
from launcher.planning.profile_check import class_numbers, measured_sizes, writable
from launcher.report.plan_table import profile_table
from launcher.report.predicted import run_mapping
from launcher.report.result import write_atomically, write_result
from launcher.resolve import Run, element_sizes, num_gpus, resolve, uses_gpu
from launcher.terminal import say
from launcher.workloads.model_share import model_units
from strategies.costs.profile_file import Profile, parse_profile
from strategies.errors import PlanError
from strategies.plan import IDLE_RANK_BYTES
from strategies.profiling.sample import sample_units


def run(config: LaunchConfig, run_dir: Path) -> int:
    resolved = resolve(config)
    given = config.profile.file
    target = run_dir / "profile.json" if given is None else writable(given, key="profile.file")
    option = None if config.profile.hardware is None else hardware_file(config.profile.hardware)
    _check(resolved)
    common = run_mapping(resolved)
    result = run_dir / "result.json"
    with failure_recorded(result, common):
        outcome = run_ranks(resolved, run_dir, None, lambda _: None, world=_num_ranks(resolved))
        text = str(outcome.pop("profile"))
        write_atomically(target, text)
    profile = parse_profile(text, label=str(target))
    write_result(result, common | outcome | {"profile": target})
    say(profile_table(profile))
    say(f"profile: {target}")
    say(f"use it: costs=profiled costs.file={target}")
    if option is not None:
        _write_hardware(option, profile, resolved)
    return 0


def _write_hardware(option: Path, profile: Profile, run: Run) -> None:
    sizes, memory = element_sizes(run.config), _rank_memory(run)
    text = hardware_yaml(option.stem, profile, run.config, run.shape, sizes, memory)
    write_atomically(option, text)
    say(f"hardware: {option}")
    say(f"use it: --config-dir {option.parent.parent} hardware={option.stem}")


def _rank_memory(run: Run) -> int:
    """What one of as many ranks as there are cores may use; a GPU's is the option's that was."""
    if uses_gpu(run.config):
        return int(run.config.hardware.memory_gb * 1e9)
    import psutil

    return int(psutil.virtual_memory().total) // (os.cpu_count() or 1)


def _num_ranks(run: Run) -> int:
    """How many processes measure: two replicas, or one where a second has no room."""
    tp = run.config.tp
    if uses_gpu(run.config):
        return tp if num_gpus() < 2 * tp else 2 * tp
    import psutil

    free, needs = psutil.virtual_memory().available, tp * _sample_bytes(run)
    if needs > free:
        raise PlanError(
            f"mode=profile holds one or two layers of each kind, here {needs / 1e9:.1f} GB with "
            f"gradients, optimizer and activations, but {free / 1e9:.1f} GB are free. Try a "
            f"smaller model.sequence than {run.shape.sequence}, or profile.microbatch_sizes=[1]."
        )
    return tp if 2 * needs > free else 2 * tp


def _sample_bytes(run: Run) -> int:
    """About what one rank holds while it measures."""
    units = model_units(run.shape)
    sample = sample_units(class_numbers(run.shape), [unit.parameters for unit in units])
    chosen = [units[place] for place in sample.units]
    sizes = element_sizes(run.config)
    state = sizes.weight + sizes.gradient + sizes.main + 2 * sizes.moment
    rows = 2 * max(measured_sizes(run.config))
    saved = sum(unit.saved_elements for unit in chosen) * rows * sizes.activation
    weights = sum(unit.parameters + unit.tied_parameters for unit in chosen) * state
    return IDLE_RANK_BYTES + (weights + saved) // run.config.tp


def _check(run: Run) -> None:
    config = run.config
    if run.own_model:
        raise PlanError(
            f"mode=profile measures the built-in transformer and the families of model=hf that "
            f"the launcher knows the sizes of, not model={config.model.name}. "
            "Try costs=analytic, or model=small."
        )
    if config.cluster.name != "local":
        raise PlanError(
            f"mode=profile starts its own processes on the machine it runs on, not on those of "
            f"cluster={config.cluster.name}. Try cluster=local, on one of them."
        )
    check_devices(run)
    cores = os.cpu_count() or 1
    if config.tp > 1 and not uses_gpu(config) and cores < 2 * config.tp:
        raise PlanError(
            f"mode=profile tp={config.tp} measures two groups of {config.tp} ranks side by side, "
            f"and this machine has {cores} cores for {2 * config.tp} ranks. Try tp=1."
        )
