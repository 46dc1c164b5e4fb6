"""The figures by which the jobs of a sweep are compared: where they come from, which is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launcher.report.sweep_job import SweepJob

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

    Args:
        figure: Which.
        jobs: With one time unit; those that are not done do not compete.
    """
    done = [job for job in jobs if job.status == "done"]
    if figure.better is None:
        return frozenset()
    shapes = {(job.result.get("pp"), job.result.get("num_microbatches")) for job in done}
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
