"""Jobs of sweeps, made as the launcher makes them: from what a command leaves in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher.report.html import Panel
from launcher.report.predicted import write_trace
from launcher.report.result import metrics_mapping, write_result
from launcher.report.sweep.sweep_jobs import SweepJob, ended_job, file_stamps
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import Metrics, measure
from strategies.analysis.timeline import Timeline


def predicted(
    schedule: str, *, pp: int = 2, num_microbatches: int = 4, grad_reduce: float = 0.0
) -> tuple[Timeline, Metrics]:
    costs = UniformCosts(grad_reduce=grad_reduce)
    program = compile_program(schedule=schedule, pp=pp, num_microbatches=num_microbatches)
    timeline = simulate(program, costs)
    return timeline, measure(timeline, costs)


def in_seconds(timeline: Timeline, scale: float) -> Timeline:
    """The same timeline as if it had been measured."""

    def scaled(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time * scale for time in row) for row in rows)

    return replace(
        timeline,
        start=scaled(timeline.start),
        end=scaled(timeline.end),
        time_unit="s",
        origin="measured",
    )


def job(
    folder: Path,
    index: int,
    *overrides: str,
    panels: tuple[Panel, ...] = (),
    result: Mapping[str, object] | None = None,
    exit_code: int | None = 0,
    error: str = "",
) -> SweepJob:
    """A job that has left ``result`` and ``panels`` in ``folder/index``."""
    own = folder / str(index)
    own.mkdir(parents=True, exist_ok=True)
    before = file_stamps(own)
    if result is not None:
        write_result(own / "result.json", result)
    if panels:
        write_trace(own / "trace.json", panels)
    return ended_job(
        index, own, overrides, asked={}, before=before, exit_code=exit_code, error=error
    )


def simulated(folder: Path, index: int, schedule: str, *more: str, **shape: float) -> SweepJob:
    """``mode=simulate costs=uniform``."""
    timeline, metrics = predicted(schedule, **shape)  # type: ignore[arg-type]
    placement = timeline.program.placement
    result = {
        "status": "done",
        "schedule": schedule,
        "pp": placement.num_ranks,
        "dp": 1,
        "stages_per_rank": placement.num_stages // placement.num_ranks,
        "num_microbatches": shape.get("num_microbatches", 4),
    } | metrics_mapping(metrics)
    overrides = ("mode=simulate", f"schedule={schedule}", *more)
    return job(
        folder, index, *overrides, panels=(Panel("predicted", timeline, metrics),), result=result
    )


def trained(folder: Path, index: int, schedule: str, *, scale: float = 0.01) -> SweepJob:
    """A training run whose step took what was predicted, an F taking ``scale`` seconds."""
    timeline, metrics = predicted(schedule)
    measured = in_seconds(timeline, scale)
    result = {"status": "done", "schedule": schedule, "pp": 2, "num_microbatches": 4}
    result |= metrics_mapping(metrics) | {
        "step_time_s": measured.makespan,
        "predicted_step_time_s": None,
        "measured_bubble_ratio": measured.bubble_ratio,
        "measured_exposed_grad_reduce_s": 0.0,
        "peak_memory_bytes": [3 * 2**20, 2**20],
        "predicted_peak_memory_bytes": [2**20, 2**19],
        "loss_last": 2.5,
        "tokens_per_s": 1000.0 / scale,
    }
    panels = (Panel("predicted", timeline, metrics), Panel("measured", measured))
    return job(folder, index, f"schedule={schedule}", panels=panels, result=result)
