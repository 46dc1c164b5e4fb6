"""``mode=eval`` and ``mode=predict``: a checkpoint on the validation text, at any pp and dp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.commands.code_check import with_checkpoints_code
from launcher.commands.ranks import (
    check_before_start,
    check_world,
    failure_recorded,
    find_checkpoint,
    has_weights,
    print_differences,
    run_ranks,
)
from launcher.config import LaunchConfig
from launcher.config.pipeline import ScheduleConfig
from launcher.report.predicted import run_mapping
from launcher.report.result import write_result
from launcher.resolve import Run, resolve, text_source
from launcher.terminal import say
from launcher.workloads.data.tokens import encode
from launcher.workloads.hf.counterpart import (
    check_destination,
    counterpart,
    export_format,
    export_target,
)
from launcher.workloads.transformer_shape import TransformerShape
from strategies.errors import DataError, PlanError


def run(config: LaunchConfig, run_dir: Path) -> int:
    check_world(config)
    resolved = resolve(config)
    checkpoint = find_checkpoint(
        resolved, config.checkpoint, run_dir, optional=has_weights(resolved)
    )
    resolved = with_checkpoints_code(resolved, checkpoint)
    check_before_start(resolved, checkpoint)
    say(f"checkpoint: {checkpoint or f'none, the weights in {config.model.path}'}")
    return finish(resolved, run_dir, _outcome(resolved, run_dir, checkpoint))


def finish(resolved: Run, run_dir: Path, outcome: dict[str, Any]) -> int:
    write_result(run_dir / "result.json", run_mapping(resolved) | outcome)
    if resolved.config.mode == "eval":
        say(_measured(outcome))
    else:
        say(f"{outcome['num_predictions']} predictions: {', '.join(outcome['predictions'])}")
    say(f"files: {run_dir}")
    return 0


def _measured(outcome: dict[str, Any]) -> str:
    """The loss, and whatever else a module of the user's own has logged."""
    loss, metrics = outcome["val_loss"], outcome.get("metrics") or {}
    words = [] if loss is None else [f"loss {loss:.6f}"]
    known = ("test_loss", "val_loss", "val_perplexity", "test_perplexity")
    words += [f"{name} {value:.6f}" for name, value in metrics.items() if name not in known]
    return "  ".join(words) or "nothing was logged: no figure to show"


# ``mode=export``: a checkpoint as a Hugging Face folder or one file, written by one process.


def export(config: LaunchConfig, run_dir: Path) -> int:
    """Writes config.json and model.safetensors, or the weights of any model into a file."""
    _check_alone(config, "writes", "from")
    resolved = resolve(config)
    checkpoint = find_checkpoint(resolved, config.checkpoint, run_dir, optional=False)
    check_before_start(resolved, checkpoint)
    kind = export_format(config, described=resolved.describes_model)
    if kind == "huggingface" and isinstance(resolved.shape, TransformerShape):
        counterpart(resolved.shape)
    target = export_target(config, run_dir, kind)
    check_destination(target)
    print_differences(resolved, checkpoint)
    say(f"checkpoint: {checkpoint}")
    outcome = _outcome(resolved, run_dir, checkpoint)
    write_result(run_dir / "result.json", run_mapping(resolved) | outcome)
    reader = {"huggingface": "transformers", "ckpt": "stock Lightning"}.get(kind, "any program")
    say(f"for {reader}: {target}")
    return 0


# ``mode=generate``: continues a prompt with a checkpoint's model, whole on one process.


def generate(config: LaunchConfig, run_dir: Path) -> int:
    _check_alone(config, "runs", "on")
    # One process has no order to choose, and some schedules cannot run on one.
    resolved = resolve(replace(config, schedule=ScheduleConfig()))
    checkpoint = find_checkpoint(
        resolved, config.checkpoint, run_dir, optional=has_weights(resolved)
    )
    check_before_start(resolved, checkpoint)
    _check_prompt(resolved)
    print_differences(resolved, checkpoint)
    outcome = _outcome(resolved, run_dir, checkpoint)
    write_result(run_dir / "result.json", run_mapping(resolved) | outcome)
    say(str(outcome["text"]))
    return 0


def _outcome(run: Run, run_dir: Path, checkpoint: Path | None) -> dict[str, Any]:
    # The words of generate and export are their answer alone.
    if run.config.mode in ("eval", "predict"):
        say(
            f"starting {run.world_size} rank{'s' if run.world_size > 1 else ''}; "
            f"logs: {run_dir / 'logs'}"
        )
    with failure_recorded(run_dir / "result.json", run_mapping(run)):
        outcome = run_ranks(run, run_dir, checkpoint, lambda _: None)
    return outcome


def _check_alone(config: LaunchConfig, does: str, where: str) -> None:
    if config.pp != 1 or config.tp != 1 or config.ep != 1 or config.dp not in (1, "auto"):
        asked = f"pp={config.pp} dp={config.dp} tp={config.tp}"
        alone = "pp=1 dp=1 tp=1"
        if config.ep > 1:
            asked, alone = f"{asked} ep={config.ep}", f"{alone} ep=1"
        if config.expert_tp:
            alone += " expert_tp=false"
        raise PlanError(
            f"mode={config.mode} {does} the whole model {where} one process, not {where} {asked}. "
            f"Try mode={config.mode} {alone} (any checkpoint can be read so)."
        )


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
