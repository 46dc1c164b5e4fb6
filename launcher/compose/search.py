"""``-m sweep.trials=20``: jobs that learn from the ones before, chosen by Optuna.

Optuna itself and not Hydra's plugin for it: the plugin's release for Hydra 1.3 needs an Optuna
before 3, and instantiates classes that a configuration names. Akiba et al., 2019,
https://arxiv.org/abs/1907.10902; the sampler is the tree-structured Parzen estimator.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.compose.execute import Command, Jobs, RunFolder, end_sweep
from launcher.compose.overrides import quote
from launcher.compose.session import CONFIG_NAME
from launcher.compose.space import TRIALS, Axis, Space
from launcher.config import LaunchConfig
from strategies.errors import PlanError

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

    from launcher.report.sweep_job import SweepJob


def check_search(config: LaunchConfig) -> None:
    """Raises where a search cannot be.

    Raises:
        PlanError: Results do not come back here, or Optuna is not installed.
    """
    if config.cluster.name == "slurm":
        raise PlanError(
            f"{TRIALS}={config.sweep.trials} chooses each job by the results of those before, and "
            "cluster=slurm only submits them. Try it inside a job with cluster=local, or a list of "
            "values without it."
        )
    _optuna()


def run_search(
    hydra: Hydra,
    space: Space,
    folder: RunFolder,
    command: Command,
    *,
    config: LaunchConfig,
    extra: Sequence[str],
) -> int:
    """Runs the trials one after the other; ends as every sweep does.

    Args:
        hydra: The application.
        space: What varies.
        folder: The sweep's.
        command: What runs one job.
        config: Of a first job: what is common to all.
        extra: Overrides for Hydra itself.

    Returns:
        As ``run_sweep``.
    """
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=config.seed)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    trials = config.sweep.trials
    assert trials is not None
    asked: list[list[str]] = []
    job = Jobs(command, jobs=asked, folder=folder.path, config=config, total=trials)
    goal = _Goal(config.sweep.metric, [axis.key for axis in space.axes])

    def run_all() -> None:
        for number in range(trials):
            trial = study.ask()
            asked.append([*space.fixed, *(_ask(trial, axis) for axis in space.axes)])
            where = quote("hydra.run.dir", str(folder.path / str(number)))
            hydra.run(CONFIG_NAME, job, overrides=[*extra, *asked[-1], where])
            value = goal.value(job.ended[-1])
            if value is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, value)

    return end_sweep(run_all, folder, job, config)


class _Goal:
    """A figure that is to become small; which one is decided by the first job that is done."""

    def __init__(self, metric: str, keys: Sequence[str]) -> None:
        from launcher.report.sweep_best import figures_for

        self._figures = figures_for(metric, keys)

    def value(self, job: SweepJob) -> float | None:
        if job.status != "done":
            return None
        for figure in self._figures:
            value = figure.value(job)
            if value is not None:
                self._figures = (figure,)
                return -value if figure.better == "high" else float(value)
        return None


def _ask(trial: Any, axis: Axis) -> str:  # noqa: ANN401 -- Optuna is optional
    if axis.choices:
        return axis.word(trial.suggest_categorical(axis.key, axis.choices))
    if axis.whole:
        low, high = math.ceil(axis.low), math.floor(axis.high)
        return axis.word(trial.suggest_int(axis.key, low, high, log=axis.log))
    value = trial.suggest_float(axis.key, axis.low, axis.high, log=axis.log)
    return axis.word(f"{value:.6g}")


def _optuna() -> Any:  # noqa: ANN401 -- Optuna is optional
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise PlanError(
            f"{TRIALS} needs the package optuna. Try pip install 'foldpipe[optuna]', or lists of "
            f"values without {TRIALS}."
        ) from None
