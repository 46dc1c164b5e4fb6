"""``mode=export``: a checkpoint as a Hugging Face folder, written by one process."""

from __future__ import annotations

from pathlib import Path

from launcher.commands.predicted import run_mapping
from launcher.commands.ranks import check_before_start, failure_recorded, find_checkpoint, run_ranks
from launcher.config import LaunchConfig
from launcher.report.result import write_result
from launcher.resolve import resolve
from launcher.terminal import say
from launcher.workloads.hf.counterpart import counterpart
from launcher.workloads.hf.destination import check_destination, export_folder
from launcher.workloads.transformer_shape import TransformerShape
from strategies.errors import PlanError


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
