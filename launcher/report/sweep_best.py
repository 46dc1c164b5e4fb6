"""Which job of a sweep is the best, and the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from launcher.config.key import shorten
from launcher.config.suggest import did_you_mean, nearest
from launcher.report.sweep_cells import write_column
from launcher.report.sweep_figures import FIGURES, Figure, best_jobs, by_time_unit
from launcher.report.sweep_job import SweepJob
from launcher.report.sweep_labels import Sweep
from strategies.errors import PlanError

AUTO = "auto"
# Where one of these varies, what a model has learnt differs, and not only how fast.
_LEARNING = ("optimizer", "model", "data", "trainer", "seed", "num_microbatches", "experiment")
_LEARNT = ("val_loss", "loss_last")
_FAST = ("tokens_per_s", "step_time_s", "makespan")


def check_metric(name: str) -> None:
    """Refuses a figure by which nothing can be the best.

    Raises:
        PlanError: With the nearest figures.
    """
    known = [figure.name for figure in FIGURES.values() if figure.better is not None]
    if name != AUTO and name not in known:
        hint = did_you_mean(f"sweep.metric={found}" for found in nearest(name, known))
        raise PlanError(
            f"sweep.metric={shorten(name)} is no figure that jobs are compared by.{hint} "
            f"Try auto, {', '.join(known)}."
        )


def best_job(sweep: Sweep, metric: str = AUTO) -> tuple[Figure, SweepJob] | None:
    """The best job, the earliest of equals; None where the jobs cannot be compared.

    Args:
        sweep: Its jobs; those that are not done do not compete.
        metric: A figure's name; auto goes by the loss where learning varies, else by speed.
    """
    groups = by_time_unit([job for job in sweep.jobs if job.status == "done"])
    if len(groups) != 1:
        return None
    _, jobs = groups[0]
    for figure in figures_for(metric, sweep.varied):
        if sum(figure.value(job) is not None for job in jobs) < 2:
            continue
        best = best_jobs(figure, jobs)
        if best:
            return figure, next(job for job in jobs if job.index in best)
    return None


def figures_for(metric: str, varied: Sequence[str]) -> tuple[Figure, ...]:
    """Figures by which jobs may be compared; the first that they have counts.

    Args:
        metric: A figure's name, or auto.
        varied: Keys with more than one value.
    """
    if metric != AUTO:
        return (FIGURES[metric],)
    learning = any(key.partition(".")[0] in _LEARNING for key in varied)
    names = (*_LEARNT, *_FAST) if learning else _FAST
    return tuple(FIGURES[name] for name in names)


def describe_best(sweep: Sweep, metric: str = AUTO) -> str | None:
    """``best by tokens_per_s (15,210): job 2: python -m launcher pp=4 schedule=foldx_fifo``."""
    found = best_job(sweep, metric)
    if found is None:
        return None
    figure, job = found
    unit, (cell,) = write_column([figure.value(job)], figure.quantity, job.time_unit)
    value = f"{cell} {unit}".rstrip()
    words = " ".join(shlex.quote(word) for word in job.overrides if not word.startswith("sweep."))
    return f"best by {figure.name} ({value}): job {job.index}: python -m launcher {words}".rstrip()
