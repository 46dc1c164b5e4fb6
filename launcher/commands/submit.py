"""``cluster=slurm``: checks a run as if it began here, writes its job script, and submits it.

The jobs of a sweep are written one by one and submitted together, as one job array.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from launcher.checkpoints import check_run_folder
from launcher.commands.code_check import with_checkpoints_code
from launcher.commands.ranks import check_before_start, find_checkpoint, has_weights
from launcher.config import LaunchConfig
from launcher.config.running import ClusterConfig
from launcher.processes.nodes import Nodes, plan_nodes
from launcher.processes.slurm_script import (
    ARRAY,
    SCRIPT,
    array_options,
    array_script,
    check_tool,
    find_sbatch,
    job_script,
    submit,
)
from launcher.processes.task import JOB_FILE, write_task
from launcher.report.html import Panel
from launcher.report.predicted import predict, write_pictures
from launcher.report.result import write_atomically
from launcher.resolve import Run, resolve
from launcher.terminal import say
from strategies.errors import PlanError


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Writes the script and what the ranks will read; then submits it, unless told not to.

    Raises:
        PlanError: The request is wrong, or SLURM has refused it; nothing stays behind then.
    """

    def hand_over() -> str | None:
        return submit(run_dir / SCRIPT) if config.cluster.submit else None

    resolved, nodes, job = _prepared(config, run_dir, hand_over)
    _tell(resolved, run_dir, nodes, job)
    return 0


def prepare(config: LaunchConfig, run_dir: Path) -> int:
    """The same for one job of a sweep, which ``submit_sweep`` submits with the others."""
    _prepared(config, run_dir, lambda: None)
    return 0


def _prepared(
    config: LaunchConfig, run_dir: Path, hand_over: Callable[[], str | None]
) -> tuple[Run, Nodes, str | None]:
    """Checks and writes all that a job needs; returns its number, too, if it has one."""
    if config.cluster.submit:
        find_sbatch()
        check_tool(config)
    resolved = resolve(on_nodes(config))
    nodes = plan_nodes(config, dp=resolved.dp)
    trains = config.mode == "train"
    asked = config.trainer.resume if trains else config.checkpoint
    optional = trains or has_weights(resolved)
    checkpoint = find_checkpoint(resolved, asked, run_dir, optional=optional)
    resolved = with_checkpoints_code(resolved, checkpoint)
    check_before_start(resolved, checkpoint)
    if trains:
        check_run_folder(run_dir, checkpoint)
    script = job_script(resolved.config, run_dir, nodes, cwd=Path.cwd())
    before = set(run_dir.iterdir())
    try:
        _write(resolved, run_dir, checkpoint, script)
        job = hand_over()
        if job is not None:
            write_atomically(run_dir / JOB_FILE, f"{job}\n")
    except PlanError:
        for path in set(run_dir.iterdir()) - before:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        raise
    return resolved, nodes, job


def submit_sweep(folder: Path, folders: Sequence[Path], cluster: ClusterConfig) -> None:
    """Submits the scripts in a sweep's folders: one job array for all that ask for the same.

    Raises:
        PlanError: SLURM has refused one; the scripts stay.
    """
    alike: dict[tuple[str, ...], dict[int, Path]] = {}
    for index, run_dir in enumerate(folders):
        script = run_dir / SCRIPT
        if script.is_file():
            alike.setdefault(array_options(script.read_text()), {})[index] = run_dir
    for number, (options, jobs) in enumerate(alike.items()):
        script = folder / (ARRAY if len(alike) == 1 else f"array_{number}.sbatch")
        text = array_script(script, options, jobs, throttle=cluster.throttle)
        write_atomically(script, text)
        shown = f"{len(jobs)} {'job' if len(jobs) == 1 else 'jobs'} of the sweep, script: {script}"
        if not cluster.submit:
            command = f"sbatch {shlex.quote(str(script))}"
            say(f"not submitted (cluster.submit=false): {shown}; to submit them: {command}")
            continue
        job = submit(script)
        for index, run_dir in jobs.items():
            write_atomically(run_dir / JOB_FILE, f"{job}_{index}\n")
        most = "" if cluster.throttle is None else f", {cluster.throttle} at a time"
        say(f"job array {job} submitted{most}: {shown}")
        say(f"state: squeue --job {job}; to end them, with checkpoints: scancel {job}")


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
