"""``mode=eval`` and ``mode=predict``: a checkpoint on the validation text, at any pp and dp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.commands.ranks import (
    check_before_start,
    check_world,
    failure_recorded,
    find_checkpoint,
    has_weights,
    run_ranks,
)
from launcher.config import LaunchConfig
from launcher.config.pipeline import ScheduleConfig
from launcher.report.predicted import run_mapping
from launcher.report.result import write_result
from launcher.resolve import Run, resolve, text_source
from launcher.terminal import say
from launcher.workloads.data.tokens import encode
from launcher.workloads.hf.counterpart import check_destination, counterpart, export_folder
from launcher.workloads.transformer_shape import TransformerShape
from strategies.errors import DataError, PlanError


def run(config: LaunchConfig, run_dir: Path) -> int:
    check_world(config)
    resolved = resolve(config)
    checkpoint = find_checkpoint(
        resolved, config.checkpoint, run_dir, optional=has_weights(resolved)
    )
    check_before_start(resolved, checkpoint)
    say(f"checkpoint: {checkpoint or f'none, the weights in {config.model.path}'}")
    common = run_mapping(resolved, "done")
    result = run_dir / "result.json"
    with failure_recorded(result, common):
        outcome = run_ranks(resolved, run_dir, checkpoint, lambda _: None)
    return finish(resolved, run_dir, outcome)


def finish(resolved: Run, run_dir: Path, outcome: dict[str, Any]) -> int:
    """Writes and prints what the ranks have found."""
    write_result(run_dir / "result.json", run_mapping(resolved, "done") | outcome)
    if resolved.config.mode == "eval":
        say(f"loss {outcome['val_loss']:.6f}")
    else:
        say(f"{outcome['num_predictions']} predictions: {', '.join(outcome['predictions'])}")
    say(f"files: {run_dir}")
    return 0


# ``mode=export``: a checkpoint as a Hugging Face folder, written by one process.


def export(config: LaunchConfig, run_dir: Path) -> int:
    """Writes config.json and model.safetensors.

    Raises:
        PlanError: More than one rank was asked for, or the folder exists.
        ModelError: The library has no such architecture.
    """
    if config.pp != 1 or config.tp != 1 or config.dp not in (1, "auto"):
        raise PlanError(
            f"mode=export writes the whole model from one process, not from pp={config.pp} "
            f"dp={config.dp} tp={config.tp}. Try mode=export pp=1 dp=1 tp=1 (any checkpoint can be "
            "read so)."
        )
    resolved = resolve(config)
    checkpoint = find_checkpoint(resolved, config.checkpoint, run_dir, optional=False)
    check_before_start(resolved, checkpoint)
    if isinstance(resolved.shape, TransformerShape):
        counterpart(resolved.shape)
    target = export_folder(config, run_dir)
    check_destination(target)
    say(f"checkpoint: {checkpoint}")
    common = run_mapping(resolved, "done")
    result = run_dir / "result.json"
    with failure_recorded(result, common):
        outcome = run_ranks(resolved, run_dir, checkpoint, lambda _: None)
    write_result(result, common | outcome)
    say(f"for transformers: {target}")
    return 0


# ``mode=generate``: continues a prompt with a checkpoint's model, whole on one process.


def generate(config: LaunchConfig, run_dir: Path) -> int:
    """Generates text."""
    if config.pp != 1 or config.tp != 1 or config.dp not in (1, "auto"):
        raise PlanError(
            f"mode=generate runs the whole model on one process, not on pp={config.pp} "
            f"dp={config.dp} tp={config.tp}. Try mode=generate pp=1 dp=1 tp=1 (any checkpoint can "
            "be read so)."
        )
    # One process has no order to choose, and some schedules cannot run on one.
    resolved = resolve(replace(config, schedule=ScheduleConfig()))
    checkpoint = find_checkpoint(
        resolved, config.checkpoint, run_dir, optional=has_weights(resolved)
    )
    check_before_start(resolved, checkpoint)
    _check_prompt(resolved)
    common = run_mapping(resolved, "done")
    result = run_dir / "result.json"
    with failure_recorded(result, common):
        outcome = run_ranks(resolved, run_dir, checkpoint, lambda _: None)
    write_result(result, common | outcome)
    say(str(outcome["text"]))
    return 0


def _check_prompt(run: Run) -> None:
    ids = encode(text_source(run.config), run.config.generate.prompt)
    if not ids:
        raise DataError(
            "generate.prompt is empty, there is nothing to continue. Try generate.prompt='def '."
        )
    if max(ids) >= run.shape.vocab:
        raise DataError(
            f"generate.prompt has a token id {max(ids)}, but model.vocab={run.shape.vocab} allows "
            f"0 to {run.shape.vocab - 1}. Try a prompt of plain ASCII."
        )
