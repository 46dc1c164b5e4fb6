"""``mode=train``: predict, start the ranks, and lay the measured step beside the predicted one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.checkpoints import check_run_folder
from launcher.commands.code_check import with_checkpoints_code
from launcher.commands.ranks import (
    begin_imports,
    check_before_start,
    check_world,
    failure_recorded,
    find_checkpoint,
    run_ranks,
)
from launcher.config import LaunchConfig
from launcher.config.check_code import model_label
from launcher.planning.plan_auto import planned
from launcher.planning.profile_check import writable, write_refined
from launcher.processes.progress import ProgressView, pruned
from launcher.report.closing_report import print_closing, write_report
from launcher.report.html import Panel
from launcher.report.predicted import memory_note, predict, write_pictures
from launcher.report.result import write_result
from launcher.report.tracked import after_training, before_training
from launcher.resolve import Run, resolve
from launcher.terminal import say
from strategies.analysis.metrics import Metrics
from strategies.analysis.timeline import Timeline
from strategies.compiler import compile_plan
from strategies.plan import Plan


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Trains; files are in ``run_dir`` whatever happens."""
    config = planned(config, run_dir)
    check_world(config)
    resolved = resolve(config)
    checkpoint = find_checkpoint(resolved, config.trainer.resume, run_dir, optional=True)
    resolved = with_checkpoints_code(resolved, checkpoint)
    check_before_start(resolved, checkpoint)
    check_run_folder(run_dir, checkpoint)
    if config.costs.refine is not None:
        writable(config.costs.refine, key="costs.refine")
    begin_imports(resolved)
    timeline, metrics = predict(resolved)
    predicted = Panel("predicted", timeline, metrics)
    write_pictures(run_dir, [predicted], resolved)
    _announce(resolved, checkpoint, run_dir)
    with (
        failure_recorded(run_dir / "result.json", before_training(resolved, metrics)),
        ProgressView(
            enabled=config.trainer.enable_progress_bar, total=config.trainer.max_steps
        ) as view,
    ):
        outcome = run_ranks(resolved, run_dir, checkpoint, pruned(view, config, run_dir))
    return finish(resolved, run_dir, outcome, (predicted, metrics))


def finish(
    resolved: Run,
    run_dir: Path,
    outcome: dict[str, Any],
    known: tuple[Panel, Metrics] | None = None,
) -> int:
    """Writes what a run that is done has measured, beside what was predicted.

    ``known``: the prediction; None to simulate it.
    """
    if known is None:
        timeline, metrics = predict(resolved)
        known = Panel("predicted", timeline, metrics), metrics
    predicted, metrics = known
    result = run_dir / "result.json"
    # What only the ranks know of a user's own model.
    skips = tuple((source, target) for source, target in outcome.pop("skips"))
    ran = replace(
        resolved.plan,
        buckets=tuple(outcome.pop("buckets")),
        skips=skips,
        exchanges=tuple(outcome.pop("exchanges")),
    )
    measured = _measured(ran, outcome.pop("timeline"))
    figures = after_training(before_training(resolved, metrics), outcome, measured)
    with failure_recorded(result, figures):  # the training itself is done
        if measured is not None:
            panel = Panel(
                "measured",
                measured,
                measured_memory=tuple(outcome.get("peak_memory_bytes") or ()),
                memory_kind=outcome.get("measured_memory_kind"),
            )
            write_pictures(run_dir, [predicted, panel], resolved)
        refine = resolved.config.costs.refine
        if refine is not None and measured is not None:
            target = writable(refine, key="costs.refine")
            write_refined(target, resolved.costs, measured)
            say(f"refined profile: {target}")
    write_result(result, figures)
    write_report(run_dir, figures)
    print_closing(resolved, run_dir, figures)
    return 0


def _announce(run: Run, checkpoint: Path | None, run_dir: Path) -> None:
    config = run.config
    known = model_label(config)
    if run.parameters is not None:
        layers = "|".join(f"{count:g}" for count in run.layers_per_stage)
        known += f": {run.parameters}, layers per stage {layers}"
    say(
        f"{known}; {config.schedule.name} on {run.world_size} ranks (pp={config.pp} dp={run.dp}"
        + (f" tp={config.tp}" if config.tp > 1 else "")
        + (f" ep={config.ep}" if config.ep > 1 else "")
        + f"), {run.num_microbatches} microbatches"
        # Only the loaders of a data module of the user's know the size of a batch.
        + ("" if run.own_data else f" of {config.data.microbatch_size}")
        + ("" if run.own_model or run.own_data else f" x {run.shape.sequence} tokens")
    )
    for note in run.notes:
        say(note)
    if (short := memory_note(run)) is not None:
        say(f"it {short}")
    if checkpoint is not None:
        say(f"continues {checkpoint}")
    say(f"logs: {run_dir / 'logs'}")


def _measured(plan: Plan, rows: dict[str, Any] | None) -> Timeline | None:
    if rows is None:
        return None
    start = tuple(tuple(row) for row in rows["start"])
    end = tuple(tuple(row) for row in rows["end"])
    return Timeline(compile_plan(plan).train, start, end, "s", "measured")
