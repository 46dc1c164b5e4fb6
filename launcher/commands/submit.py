"""``cluster=slurm``: checks a run as if it began here, writes its job script, and submits it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

from launcher.checkpoints import check_run_folder
from launcher.commands.ranks import check_before_start, find_checkpoint, has_weights
from launcher.config import LaunchConfig
from launcher.processes.nodes import Nodes, plan_nodes
from launcher.processes.slurm_script import SCRIPT, find_sbatch, job_script, submit
from launcher.processes.task import write_task
from launcher.report.html import Panel
from launcher.report.predicted import predict, write_pictures
from launcher.report.result import write_atomically
from launcher.resolve import Run, resolve
from launcher.terminal import say
from strategies.errors import PlanError

JOB_FILE = "slurm_job.txt"


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Writes the script and what the ranks will read; then submits it, unless told not to.

    Raises:
        PlanError: The request is wrong, or SLURM has refused it; nothing stays behind then.
    """
    if config.cluster.submit:
        find_sbatch()
    resolved = resolve(on_nodes(config))
    nodes = plan_nodes(config, dp=resolved.dp)
    trains = config.mode == "train"
    asked = config.trainer.resume if trains else config.checkpoint
    optional = trains or has_weights(resolved)
    checkpoint = find_checkpoint(resolved, asked, run_dir, optional=optional)
    check_before_start(resolved, checkpoint)
    if trains:
        check_run_folder(run_dir, checkpoint)
    script = job_script(resolved.config, run_dir, nodes, cwd=Path.cwd())
    before = set(run_dir.iterdir())
    job = None
    try:
        _write(resolved, run_dir, checkpoint, script)
        if config.cluster.submit:
            job = submit(run_dir / SCRIPT)
            write_atomically(run_dir / JOB_FILE, f"{job}\n")
    except PlanError:
        for path in set(run_dir.iterdir()) - before:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        raise
    _tell(resolved, run_dir, nodes, job)
    return 0


def on_nodes(config: LaunchConfig) -> LaunchConfig:
    """The configuration as the nodes are to understand it."""
    wanted, gpus = config.trainer.accelerator, config.cluster.gpus_per_node
    if wanted == "gpu" and gpus is None:
        raise PlanError(
            "trainer.accelerator=gpu, but cluster.gpus_per_node=null asks SLURM for none. "
            "Try cluster.gpus_per_node=8."
        )
    if wanted == "cpu" and gpus is not None:
        raise PlanError(
            f"trainer.accelerator=cpu, but cluster.gpus_per_node={gpus} asks SLURM for GPUs. "
            "Try without one of them."
        )
    # A node may have GPUs that were not asked for.
    device: Literal["cpu", "gpu"] = "cpu" if gpus is None else "gpu"
    return replace(config, trainer=replace(config.trainer, accelerator=device))


def _write(run: Run, run_dir: Path, checkpoint: Path | None, script: str) -> None:
    if run.config.mode == "train":
        timeline, metrics = predict(run)
        write_pictures(run_dir, [Panel("predicted", timeline, metrics)], run)
    (run_dir / "logs").mkdir(exist_ok=True)  # SLURM makes no folder for its files
    write_task(run, run_dir, checkpoint)
    write_atomically(run_dir / SCRIPT, script)


def _tell(run: Run, run_dir: Path, nodes: Nodes, job: str | None) -> None:
    for line in nodes.describe():
        say(line)
    if (note := nodes.note()) is not None:
        say(note)
    script = run_dir / SCRIPT
    if job is None:
        say(f"script: {script}")
        say(f"not submitted (cluster.submit=false); to submit it: sbatch {script}")
    else:
        say(f"job {job} submitted: {run.world_size} ranks, script: {script}")
        say(f"follow: tail -F {run_dir}/logs/rank_00000.log {run_dir}/slurm-{job}.out")
        say(f"state: squeue --job {job}; to end it, with a checkpoint: scancel {job}")
    say(f"files: {run_dir}")
