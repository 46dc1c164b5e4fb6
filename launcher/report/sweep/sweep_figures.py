"""The figures by which the jobs of a sweep are compared: where they come from, which is better."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from launcher.config.decode import did_you_mean, nearest
from launcher.config.key import shorten
from launcher.report.result import inert, write_atomically
from launcher.report.rows import TimelineData
from launcher.report.summary import SECONDS, format_duration, format_percent
from launcher.report.sweep.sweep_jobs import Sweep, SweepJob, override_values
from launcher.report.typed_command import paste
from strategies.errors import PlanError

Quantity = Literal["time", "seconds", "percent", "number", "bytes", "count", "loss"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a job.

    Attributes:
        name: Its column in sweep.csv.
        heading: Over its column in tables; a line break stands where it may be broken.
        quantity: How it is written. ``time`` is in the job's own unit.
        better: Which value is marked, None for figures that are no merit.
        sources: Its keys in result.json where that is not ``name``; the first that is there
            counts, and of a list the largest value.
        only_with: A key without which a job has no such figure.
    """

    name: str
    heading: str
    quantity: Quantity
    better: Literal["low", "high"] | None = "low"
    sources: tuple[str, ...] = ()
    only_with: str = ""

    def value(self, job: SweepJob) -> int | float | None:
        """The figure of a job exactly as in result.json, None where there is none."""
        if self.only_with and self.only_with not in job.result:
            return None
        names = self.sources or (self.name,)
        found = next((job.result[name] for name in names if name in job.result), None)
        if isinstance(found, list):
            known = [value for value in found if isinstance(value, (int, float))]
            return max(known) if known else None
        return found if isinstance(found, (int, float)) else None


_STEP = (
    Figure("makespan", "makespan", "time"),
    Figure("period", "period", "time"),
    Figure("bubble_ratio", "bubble", "percent"),
    Figure("peak_activations_max", "peak\nactivations", "number", sources=("peak_activations",)),
    Figure("peak_memory_bytes_max", "peak\nmemory", "bytes", sources=("peak_memory_bytes",)),
    Figure("exposed_grad_reduce", "exposed\nreduction", "time"),
    Figure("bound_gap", "gap to\nbound", "percent"),
    Figure("gap_to_ideal", "gap to\nideal", "percent"),
    Figure("weight_copies", "weight\ncopies", "count", better=None),
)
_RUN = (
    Figure("step_time_s", "step time", "seconds"),
    Figure("predicted_step_time_s", "predicted\nstep time", "seconds", better=None),
    Figure("measured_bubble_ratio", "bubble", "percent"),
    Figure("measured_makespan_s", "makespan", "seconds"),
    Figure("measured_period_s", "period", "seconds"),
    Figure("measured_exposed_grad_reduce_s", "exposed\nreduction", "seconds"),
    Figure(
        "predicted_peak_memory_bytes_max",
        "predicted\nmemory",
        "bytes",
        better=None,
        sources=("predicted_peak_memory_bytes",),
    ),
    Figure("loss_last", "last loss", "loss"),
    Figure("val_loss", "validation\nloss", "loss"),
    Figure("tokens_per_s", "tokens/s", "count", better="high"),
)
FIGURES: dict[str, Figure] = {figure.name: figure for figure in (*_STEP, *_RUN)}

# ``peak_memory_bytes`` of a run is measured, and the prediction has a key of its own; of a
# simulation it is the prediction.
_PREDICTED_MEMORY, _MEASURED_MEMORY = "predicted_peak_memory_bytes", "peak_memory_bytes"
PREDICTED = tuple(
    replace(figure, sources=(_PREDICTED_MEMORY, _MEASURED_MEMORY))
    if figure.name == "peak_memory_bytes_max"
    else figure
    for figure in _STEP
)

# What a run measured, and the prediction that stands beside it.
_PAIRS: tuple[tuple[Figure, str | None], ...] = (
    (FIGURES["step_time_s"], "predicted_step_time_s"),
    (FIGURES["measured_bubble_ratio"], "bubble_ratio"),
    (FIGURES["measured_makespan_s"], "makespan"),
    (FIGURES["measured_period_s"], "period"),
    (FIGURES["measured_exposed_grad_reduce_s"], "exposed_grad_reduce"),
    (
        replace(FIGURES["peak_memory_bytes_max"], only_with=_PREDICTED_MEMORY),
        "predicted_peak_memory_bytes_max",
    ),
    (FIGURES["tokens_per_s"], None),
    (FIGURES["loss_last"], None),
    (FIGURES["val_loss"], None),
)


def measured_figures(jobs: Sequence[SweepJob]) -> tuple[Figure, ...]:
    """Measured figures that any of the jobs has, each with its prediction behind it."""
    found: list[Figure] = []
    for measured, predicted in _PAIRS:
        if all(measured.value(job) is None for job in jobs):
            continue
        found.append(measured)
        if predicted is not None:
            short = FIGURES[predicted].heading.removeprefix("predicted\n").partition("\n")[0]
            found.append(replace(FIGURES[predicted], heading=f"predicted\n{short}", better=None))
    return tuple(found)


def best_jobs(figure: Figure, jobs: Sequence[SweepJob]) -> frozenset[int]:
    """Indices of the jobs with the best value; empty where all are equal or not comparable.

    An F is what a rank computes for one microbatch: a makespan in F says which job is faster only
    among jobs with as many ranks and microbatches.

    ``jobs``: with one time unit; those that are not done do not compete.
    """
    done = [job for job in jobs if job.status == "done"]
    if figure.better is None:
        return frozenset()
    # As text: a result may have been edited, and a list has no hash.
    shapes = {str([job.result.get(key) for key in ("pp", "num_microbatches")]) for job in done}
    in_f = figure.quantity == "time" and any(job.time_unit == "F" for job in done)
    if in_f and len(shapes) > 1:
        return frozenset()
    values = {j.index: value for j in done if (value := figure.value(j)) is not None}
    if len(values) < 2:
        return frozenset()
    choose: Callable[..., float] = min if figure.better == "low" else max
    best = choose(values.values())
    # Sums of durations round; what the table writes alike must not be marked differently.
    margin = 1e-9 * max(map(abs, values.values()))
    marked = frozenset(i for i, value in values.items() if abs(value - best) <= margin)
    return marked if len(marked) < len(values) else frozenset()


def by_time_unit(jobs: Sequence[SweepJob]) -> tuple[tuple[str | None, tuple[SweepJob, ...]], ...]:
    """Groups of jobs whose figures can stand in one table, by their first job's turn.

    Jobs without figures, refused ones say, stand among the others if those agree on a unit.
    """
    units = list(dict.fromkeys(job.time_unit for job in jobs))
    known = [unit for unit in units if unit is not None]
    if len(known) <= 1:
        return ((known[0] if known else None, tuple(jobs)),) if jobs else ()
    ordered = known + [None] * (None in units)
    return tuple((unit, tuple(j for j in jobs if j.time_unit == unit)) for unit in ordered)


def timeline_facts(job: SweepJob, timeline: TimelineData) -> str:
    """The figures that explain a picture: makespan, bubble, peak."""
    unit, makespan = timeline.panel["unit"], timeline.panel["makespan"]
    assert isinstance(unit, str)
    assert isinstance(makespan, (int, float))
    facts = [f"makespan {format_duration(makespan, unit)}"]
    measured = timeline.label == "measured"
    if "versions" in timeline.panel:
        # Without a flush the picture is of several batches, and a step is the time between two.
        period = FIGURES["measured_period_s" if measured else "period"].value(job)
        facts = [] if period is None else [f"period {format_duration(period, unit)}"]
    bubble = FIGURES["measured_bubble_ratio" if measured else "bubble_ratio"].value(job)
    if bubble is not None:
        facts.append(f"bubble {format_percent(bubble)}")
    peak = FIGURES["peak_activations_max"].value(job)
    if peak is not None and not measured:
        facts.append(f"peak {peak:.4g} microbatch{'' if peak == 1 else 'es'}")
    return ", ".join(facts)


# Which job of a sweep is the best, and the command that repeats it.

AUTO = "auto"
# Where one of these varies, what a model has learnt differs, and not only how fast.
_LEARNING = ("optimizer", "model", "data", "trainer", "seed", "num_microbatches", "experiment")
_LEARNT = ("val_loss", "loss_last")
_FAST = ("tokens_per_s", "step_time_s", "makespan")


def check_metric(name: str) -> None:
    """Refuses a figure by which nothing can be the best."""
    known = [figure.name for figure in FIGURES.values() if figure.better is not None]
    if name != AUTO and name not in known:
        hint = did_you_mean(f"sweep.metric={found}" for found in nearest(name, known))
        raise PlanError(
            f"sweep.metric={shorten(name)} is no figure that jobs are compared by.{hint} "
            f"Try auto, {', '.join(known)}."
        )


def _best_job(sweep: Sweep, metric: str = AUTO) -> tuple[Figure, SweepJob] | None:
    """The best job, the earliest of equals; None where the jobs cannot be compared.

    ``metric``: A figure's name; auto goes by the loss where learning varies, else by speed.
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
    """Figures by which jobs may be compared; the first that they have counts."""
    if metric != AUTO:
        return (FIGURES[metric],)
    learning = any(key.partition(".")[0] in _LEARNING for key in varied)
    names = (*_LEARNT, *_FAST) if learning else _FAST
    return tuple(FIGURES[name] for name in names)


def describe_best(sweep: Sweep, metric: str = AUTO) -> str | None:
    """``best by tokens_per_s (15,210): job 2: python -m launcher pp=4 schedule=foldx_fifo``."""
    found = _best_job(sweep, metric)
    if found is None:
        return None
    figure, job = found
    unit, (cell,) = write_column([figure.value(job)], figure.quantity, job.time_unit)
    value = f"{cell} {unit}".rstrip()
    words = [word for word in job.overrides if not word.startswith("sweep.")]
    return f"best by {figure.name} ({value}): job {job.index}: {paste(job.folder, words)}"


# How the figures of a column are written: one unit and as many decimals for all of them.

_BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_FORMATS: dict[Quantity, str] = {"percent": "{:.1%}", "count": "{:,.0f}", "loss": "{:.4f}"}
_MAX_DECIMALS = 3

Number = int | float | None


def write_column(
    values: Sequence[Number], quantity: Quantity, time_unit: str | None
) -> tuple[str, list[str]]:
    """The column's unit, and a text per value; empty for None.

    ``time_unit`` is that of ``time`` values, ``F`` or ``s``.

    >>> write_column([0.0125, None, 0.00098], "seconds", None)
    ('ms', ['12.50', '', '0.98'])
    >>> write_column([33.0, 28.5], "time", "F")
    ('F', ['33.0', '28.5'])
    >>> write_column([0.375, 0.0], "percent", None)
    ('%', ['37.5', '0.0'])
    """
    pattern = _FORMATS.get(quantity)
    if pattern is not None:
        texts = ["" if value is None else pattern.format(value) for value in values]
        unit = "%" if quantity == "percent" else ""
        return unit, [text.removesuffix("%") for text in texts]
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    if quantity == "seconds" or (quantity == "time" and time_unit == "s"):
        scale, unit = _scale(SECONDS, largest)
    elif quantity == "bytes":
        scale, unit = _scale(_BYTES, largest)
    else:
        scale, unit = 1.0, "F" if quantity == "time" else ""
    return unit, _aligned([None if value is None else value / scale for value in values])


def _scale(units: Sequence[tuple[float, str]], largest: float) -> tuple[float, str]:
    """The largest unit in which the largest value is at least 1."""
    if largest == 0.0:
        return units[0]
    return next((pair for pair in units if largest >= pair[0]), units[-1])


def _aligned(values: Sequence[Number]) -> list[str]:
    """Four significant digits, the decimal points under each other."""
    short = [f"{value:.4g}" for value in values if value is not None and abs(value) < 1e15]
    if any("e" in text for text in short):
        short = [f"{value:.{_MAX_DECIMALS}f}" for value in values if value is not None]
    decimals = max((len(text.partition(".")[2]) for text in short), default=0)
    decimals = min(decimals, _MAX_DECIMALS)
    return ["" if value is None else f"{value:,.{decimals}f}" for value in values]


# sweep.csv and sweep.json: every job's figures exactly as in its result.json.
#
# The columns of sweep.csv, in this order:
#
# - ``job folder status label``: number, folder below the sweep's own, how it ended (``done failed
# refused preempted interrupted``), and the overrides that tell it from the others;
# - a column per varied override, under its key, with the value as typed. Keys that have a column
# below, ``schedule`` or ``pp`` say, get none of their own;
# - ``schedule pp dp tp stages_per_rank num_microbatches``;
# - predicted: ``makespan period bubble_ratio peak_activations_max peak_memory_bytes_max
# exposed_grad_reduce bound_gap gap_to_ideal weight_copies synchronous`` and their ``time_unit``;
# ``_max`` is the largest of all ranks;
# - of runs: ``step_time_s predicted_step_time_s measured_bubble_ratio measured_makespan_s
# measured_period_s measured_exposed_grad_reduce_s predicted_peak_memory_bytes_max loss_last
# val_loss tokens_per_s``; their ``peak_memory_bytes_max`` is measured as well;
# - ``error``.
#
# A cell is empty where a job has no such figure.

_JOB = ("job", "folder", "status", "label")
_SHAPE = ("schedule", "pp", "dp", "tp", "stages_per_rank", "num_microbatches")
_PREDICTED = tuple(figure.name for figure in PREDICTED)
_MEASURED = tuple(name for name in FIGURES if name not in _PREDICTED)
FIXED = (*_JOB, *_SHAPE, *_PREDICTED, "synchronous", "time_unit", *_MEASURED, "error")


def columns(sweep: Sweep) -> tuple[str, ...]:
    own = tuple(key for key in sweep.varied if key not in FIXED)
    return (*_JOB, *own, *FIXED[len(_JOB) :])


def write_sweep_csv(path: Path, sweep: Sweep) -> None:
    file = io.StringIO()
    writer = csv.DictWriter(file, columns(sweep), lineterminator="\n")
    writer.writeheader()
    for job in sweep.jobs:
        writer.writerow(_row(sweep, job, path.parent))
    write_atomically(path, file.getvalue())


def write_sweep_json(path: Path, sweep: Sweep) -> None:
    jobs = [
        {
            "job": job.index,
            "folder": relative_folder(job, path.parent),
            "status": job.status,
            "exit_code": job.exit_code,
            "label": sweep.label(job),
            "overrides": override_values(job.overrides),
            "error": job.error or None,
            "result": job.result,
        }
        for job in sweep.jobs
    ]
    content = {"num_jobs": sweep.num_jobs, "varied": sweep.varied, "jobs": jobs}
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def relative_folder(job: SweepJob, folder: Path) -> str:
    return Path(os.path.relpath(job.folder, folder)).as_posix()


def _row(sweep: Sweep, job: SweepJob, folder: Path) -> dict[str, object]:
    given = override_values(job.overrides)
    row: dict[str, object] = {key: given.get(key) for key in sweep.varied if key not in FIXED}
    row |= {
        "job": job.index,
        "folder": relative_folder(job, folder),
        "status": job.status,
        "label": sweep.label(job),
    }
    row |= {key: job.result.get(key) for key in (*_SHAPE, "synchronous", "time_unit")}
    row |= {name: figure.value(job) for name, figure in FIGURES.items()}
    row["error"] = job.error
    return {key: inert(cell) if isinstance(cell, str) else cell for key, cell in row.items()}
