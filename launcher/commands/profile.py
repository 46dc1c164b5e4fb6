"""``mode=profile``: measures layers and links here, and writes what ``costs=profiled`` reads."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.commands.predicted import run_mapping
from launcher.commands.ranks import check_machine, failure_recorded, run_ranks
from launcher.config import LaunchConfig
from launcher.profiled import writable
from launcher.report.atomic import write_atomically
from launcher.report.profile_table import profile_table
from launcher.report.result import write_result
from launcher.resolve import Run, num_gpus, resolve, uses_gpu
from launcher.terminal import say
from strategies.costs.profile import parse_profile
from strategies.errors import PlanError


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Measures.

    Raises:
        PlanError: The model or the machine cannot be measured, or the file cannot be written.
    """
    resolved = resolve(config)
    target = _target(config, run_dir)
    _check(resolved)
    world = profile_ranks(resolved)
    common = run_mapping(resolved, "done")
    result = run_dir / "result.json"
    with failure_recorded(result, common):
        outcome = run_ranks(resolved, run_dir, None, lambda _: None, world=world)
    text = str(outcome.pop("profile"))
    write_atomically(target, text)
    write_result(result, common | outcome | {"profile": target})
    say(profile_table(parse_profile(text, label=str(target))))
    say(f"profile: {target}")
    say(f"use it: costs=profiled costs.file={target}")
    return 0


def profile_ranks(run: Run) -> int:
    """How many processes measure: two replicas, one where a second has no GPU."""
    tp = run.config.tp
    if uses_gpu(run.config) and num_gpus() < 2 * tp:
        return tp
    return 2 * tp


def _target(config: LaunchConfig, run_dir: Path) -> Path:
    given = config.profile.file
    if given is None:
        return run_dir / "profile.json"
    return writable(given, key="profile.file")


def _check(run: Run) -> None:
    config = run.config
    if run.own_model:
        raise PlanError(
            f"mode=profile measures the built-in transformer and the families of model=hf that "
            f"the launcher knows the sizes of, not model={config.model.name}. "
            "Try costs=analytic, or model=small."
        )
    check_machine(run)
    cores = os.cpu_count() or 1
    if config.tp > 1 and not uses_gpu(config) and cores < 2 * config.tp:
        raise PlanError(
            f"mode=profile tp={config.tp} measures two groups of {config.tp} ranks side by side, "
            f"and this machine has {cores} cores for {2 * config.tp} ranks. Try tp=1."
        )
