"""What a training run predicts and measures: for result.json, and under its names in trackers.

Trackers show pairs, ``predicted/NAME`` next to ``measured/NAME``. docs/reference/metrics.md lists
every name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config import LaunchConfig, dump
from launcher.config.running import LONGEST_TAG
from launcher.report.predicted import peak_mapping, predicted_mapping, run_mapping, step_flops
from launcher.resolve import Run
from strategies.analysis.metrics import Metrics
from strategies.analysis.timeline import Timeline

# Columns of metrics.csv that have another name in trackers; all others keep theirs.
_ROW_NAMES = {
    "step_time_s": "measured/step_time_s",
    "bubble_ratio": "measured/bubble_ratio",
    "exposed_grad_reduce_s": "measured/exposed_grad_reduce_s",
}
# The first is the axis; trackers get the memory of every rank in place of the second.
_NOT_IN_ROWS = ("step", "peak_memory_bytes_max")

# Fields of result.json that trackers keep once per run.
_SUMMARY_NAMES = {
    "predicted_step_time_s": "predicted/step_time_s",
    "bubble_ratio": "predicted/bubble_ratio",
    "predicted_peak_memory_bytes": "predicted/peak_memory_bytes",
    "binding_bound": "predicted/binding_bound",
    "bound_gap": "predicted/bound_gap",
    "gap_to_ideal": "predicted/gap_to_ideal",
    "time_unit": "predicted/time_unit",
    "step_time_s": "measured/step_time_s",
    "measured_makespan_s": "measured/makespan_s",
    "measured_period_s": "measured/period_s",
    "measured_norm_sync_s": "measured/norm_sync_s",
    "measured_bubble_ratio": "measured/bubble_ratio",
    "measured_exposed_grad_reduce_s": "measured/exposed_grad_reduce_s",
    "measured_memory_kind": "measured/memory_kind",
} | {
    name: name
    for name in (
        "status", "steps", "skipped_steps", "restarts", "flush_repairs", "num_parameters",
        "loss_first", "loss_last", "val_loss", "tokens_per_s", "mfu", "peak_flops", "peak_format",
        "checkpoint",
    )
}  # fmt: skip
# Of a prediction in seconds. With costs=uniform times are in F, which no run measures.
_SECONDS_NAMES = {
    "makespan": "predicted/makespan_s",
    "period": "predicted/period_s",
    "lower_bound": "predicted/lower_bound_s",
    "lb1": "predicted/lb1_s",
    "lb2": "predicted/lb2_s",
    "exposed_grad_reduce": "predicted/exposed_grad_reduce_s",
}
# What rows repeat of the prediction: a line next to that of each measurement.
_REPEATED = ("step_time_s", "bubble_ratio", "exposed_grad_reduce_s", "peak_memory_bytes/")


def request(run: Run) -> dict[str, Any]:
    """The configuration as a tracker keeps it: what was asked for, ``auto`` filled in.

    ``layout`` has what the run made of it: sizes, stages, and the schedule with its options.
    """
    known = run_mapping(run)
    layout = {
        name: known[name]
        for name in ("schedule", "pp", "dp", "tp", "ep", "stages_per_rank", "num_microbatches",
                     "group", "split_backward", "recompute", "overlap")
    }  # fmt: skip
    layout |= {
        "world_size": run.world_size,
        "num_stages": run.programs.train.placement.num_stages,
        "layers_per_stage": list(run.layers_per_stage) if run.stages else None,
    }
    filled = {"dp": run.dp, "num_microbatches": run.num_microbatches}
    return dump(run.config) | filled | {"layout": layout}


def group_and_tags(config: LaunchConfig, dp: int) -> tuple[str, list[str]]:
    """Where W&B files a run: by schedule and sizes, and by tags of the user."""
    sizes = [f"pp={config.pp}", f"dp={dp}", f"tp={config.tp}"]
    sizes += [f"ep={config.ep}"] if config.ep > 1 else []
    words = [config.schedule.name, *sizes]
    ours = [word[:LONGEST_TAG] for word in (*words, config.experiment_name)]
    tags = dict.fromkeys([*ours, *config.tracking.tags])
    return config.tracking.group or " ".join(words), list(tags)


def before_training(run: Run, metrics: Metrics) -> dict[str, object]:
    """result.json as far as it is known before step 1."""
    waits = run.config.trainer.waits_at_flush and run.options.post_validation is not True
    steady = metrics.makespan if waits else metrics.period
    step_s = steady * run.config.trainer.accumulate_grad_batches
    peaks = metrics.peak_memory_bytes
    return predicted_mapping(run, metrics) | {
        "num_active_parameters": run.num_active_parameters or run.num_parameters,
        "model_flops_per_step": step_flops(run),
        **peak_mapping(run.config),
        "predicted_step_time_s": step_s if metrics.time_unit == "s" else None,
        "predicted_peak_memory_bytes": None if None in peaks else list(peaks),
    }


def after_training(
    known: Mapping[str, object], outcome: Mapping[str, object], measured: Timeline | None
) -> dict[str, object]:
    """result.json of a run that is done.

    Args:
        known: Of ``before_training``.
        outcome: What the ranks have counted and measured.
        measured: Their last step.
    """
    found: dict[str, object] = {
        "measured_makespan_s": None,
        "measured_period_s": None,
        "measured_bubble_ratio": None,
        "measured_exposed_grad_reduce_s": None,
    }
    if measured is not None:
        # Without a flush a step is one batch of the steady state, as it is where it is predicted.
        took = measured.makespan if known["synchronous"] else measured.period
        found = {
            "measured_makespan_s": took,
            "measured_period_s": measured.period,
            "measured_bubble_ratio": measured.bubble_ratio,
            "measured_exposed_grad_reduce_s": measured.exposed_grad_reduce,
        }
    peaks = {"measured_peak_memory_bytes": outcome.get("peak_memory_bytes")}
    return {**known, **outcome, **found, **peaks}


def summary_metrics(result: Mapping[str, object]) -> dict[str, Any]:
    """What a tracker keeps once per run, by name; ``result``: the mapping of result.json."""
    names = _SUMMARY_NAMES | (_SECONDS_NAMES if result.get("time_unit") == "s" else {})
    kind = result.get("measured_memory_kind")
    names = names | {"measured_peak_memory_bytes": _memory_name(on_gpu=kind == "allocator_peak")}
    found: dict[str, Any] = {}
    for field, name in names.items():
        value = result.get(field)
        if isinstance(value, list | tuple):
            found |= {_of_rank(name, rank): each for rank, each in enumerate(value)}
        elif value is not None:
            found[name] = value
    return found


def row_metrics(row: Mapping[str, Any], peaks: Sequence[int], *, on_gpu: bool) -> dict[str, float]:
    """A row of metrics.csv as trackers get it; ``peaks``: bytes, per pipeline rank."""
    found = {
        _ROW_NAMES.get(column, column): float(value)
        for column, value in row.items()
        if value is not None and column not in _NOT_IN_ROWS
    }
    name = _memory_name(on_gpu=on_gpu)
    return found | {_of_rank(name, rank): float(peak) for rank, peak in enumerate(peaks)}


def _memory_name(*, on_gpu: bool) -> str:
    """What was measured of a rank's memory; only an allocator counts what is predicted."""
    return "measured/peak_memory_bytes" if on_gpu else "measured/process_growth_bytes"


def repeated_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """What every row repeats of a prediction."""
    heads = tuple(f"predicted/{name}" for name in _REPEATED)
    return {name: float(value) for name, value in summary.items() if name.startswith(heads)}


def _of_rank(name: str, rank: int) -> str:
    return f"{name}/rank_{rank:05d}"
