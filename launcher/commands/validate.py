"""``mode=validate``: everything that can be known without starting anything."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from launcher.commands.code_check import with_checkpoints_code
from launcher.commands.ranks import (
    check_before_start,
    check_world,
    failure_recorded,
    find_checkpoint,
)
from launcher.commands.submit import on_nodes
from launcher.config import LaunchConfig
from launcher.planning.model_trace import check_buildable, traced_shape
from launcher.planning.plan_auto import planned
from launcher.processes.nodes import Nodes, node_commands, plan_nodes
from launcher.processes.slurm_script import check_tool, job_script, try_out
from launcher.report.html import Panel, memory_line
from launcher.report.predicted import (
    memory_margin,
    memory_note,
    predict,
    predicted_mapping,
    rank_memory,
    write_pictures,
)
from launcher.report.result import write_result
from launcher.report.summary import print_summary
from launcher.report.typed_command import paste, typed_flags, typed_words
from launcher.resolve import Run, resolve
from launcher.terminal import say
from launcher.workloads.hf.hf_shape import HfShape
from strategies.errors import ModelError
from strategies.planner.stage_layers import stage_layers


def run(config: LaunchConfig, run_dir: Path) -> int:
    config = planned(config, run_dir)
    check_world(config)
    resolved = resolve(on_nodes(config) if config.cluster.name == "slurm" else config)
    checkpoint = find_checkpoint(resolved, config.trainer.resume, run_dir, optional=True)
    resolved = with_checkpoints_code(resolved, checkpoint)
    check_before_start(resolved, checkpoint)
    if isinstance(resolved.shape, HfShape):
        check_buildable(resolved)
    job = _job(resolved, run_dir) if config.cluster.name == "slurm" else None
    nodes = plan_nodes(resolved.config, dp=resolved.dp) if _on_nodes(resolved) else None
    timeline, metrics = predict(resolved)
    result = predicted_mapping(resolved, metrics)
    with failure_recorded(run_dir / "result.json", result):
        write_pictures(run_dir, [Panel("predicted", timeline, metrics)], resolved)
    write_result(run_dir / "result.json", result)
    say(_plan(resolved, _layers(resolved, run_dir)))
    if checkpoint is not None:
        say(f"continues {checkpoint}")
    print_summary(result)
    _say_commands(resolved, run_dir, _overrides(run_dir), job, nodes)
    note, margin = memory_note(resolved), memory_margin(resolved)
    if margin is not None:
        say(margin)
    say("valid: nothing was started" if note is None else f"valid, but it {note}")
    return 0


def _job(run: Run, run_dir: Path) -> tuple[str, str]:
    """The job's script, and what SLURM says of it where it is there."""
    nodes = plan_nodes(run.config, dp=run.dp)
    script = job_script(replace(run.config, mode="train"), run_dir, nodes, cwd=Path.cwd())
    if shutil.which("sbatch") is not None:
        check_tool(run.config)
    return script, try_out(script)


def _on_nodes(run: Run) -> bool:
    cluster = run.config.cluster
    return cluster.name != "local" or cluster.nodes > 1


def _say_commands(
    run: Run,
    run_dir: Path,
    words: list[str],
    job: tuple[str, str] | None,
    nodes: Nodes | None,
) -> None:
    cluster = run.config.cluster
    if nodes is None:
        say(f"command on this machine: {paste(run_dir, words)}")
        return
    for line in nodes.describe():
        say(line)
    if (note := nodes.note()) is not None:
        say(note)
    if job is not None:
        script, tried = job
        say(f"job script:\n{script}\n{tried}")
        say(f"command on a login node: {paste(run_dir, words)}")
        return
    commands = node_commands(nodes, [*typed_flags(run_dir), *words], master=cluster.master)
    for node, command in enumerate(commands):
        say(f"command on node {node}: {command}")


def _layers(run: Run, run_dir: Path) -> tuple[str, ...] | None:
    """The layers of each stage of a model that only its ranks know, found as they find them."""
    stages = run.programs.train.placement.num_stages
    if not run.own_model or stages == 1:
        return None
    try:
        shape = traced_shape(run.config, run_dir)
    except ModelError as error:
        say(f"note: its stages cannot be listed, and training may refuse it: {error}")
        return None
    if shape is None:
        return None
    counts, rows = run.options.units_per_stage, max(1, run.batch_size)
    return stage_layers(shape.trace, stages, counts, rows=rows)


def _plan(run: Run, found: tuple[str, ...] | None) -> str:
    """Per rank: its stages, their layers, and the memory that they take.

    ``found``: the layers of each stage where a trace has found them.
    """
    placement = run.programs.train.placement
    memory = rank_memory(run)
    lines = [
        f"{run.world_size} processes: pp={run.config.pp} dp={run.dp} tp={run.config.tp}"
        + (f" ep={run.config.ep}, " if run.config.ep > 1 else ", ")
        + f"{run.num_microbatches} microbatches"
        # Only the loaders of a data module of the user's know the size of a batch.
        + ("" if run.own_data else f" of {run.config.data.microbatch_size}")
        + f" per step and replica{f', {run.parameters}' if run.num_parameters else ''}",
        f"programs verified: train, accumulate, forward "
        f"({sum(map(len, run.programs.train.ranks))} instructions per training step)",
    ]
    lines += run.notes
    sharers = f" (each of {run.config.tp} tp ranks)" if run.config.tp > 1 else ""
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        if found is not None:
            lines += [f"rank {rank}{sharers}: stage {stage}: {found[stage]}" for stage in stages]
            continue
        layers = ", ".join(
            f"stage {s}" + ("" if run.own_model else f": {run.layers_per_stage[s]:g} layers")
            for s in stages
        )
        if memory is not None:
            layers += f"; memory {memory_line(memory[rank])}"
        lines.append(f"rank {rank}{sharers}: {layers}")
    return "\n".join(lines)


def _overrides(run_dir: Path) -> list[str]:
    return [word for word in typed_words(run_dir) if not word.startswith("mode=")]
