"""The job script of ``cluster=slurm``: one readable file, from checked values only.

What a user chooses stands in ``#SBATCH`` lines, which no shell reads, and has matched a pattern as
a whole (``launcher.config.check_cluster``). Paths are quoted.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from launcher.config import LaunchConfig
from launcher.config.key import shorten
from launcher.processes.nodes import Nodes
from strategies.errors import PlanError

SCRIPT = "job.sbatch"
# SLURM expands % in names of logs; a blank or a quote would end a word of an #SBATCH line.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./=,+@:~-]*")


def job_script(config: LaunchConfig, run_dir: Path, nodes: Nodes, *, cwd: Path) -> str:
    """The text of the script."""
    if not _PLAIN_PATH.fullmatch(str(run_dir)):
        raise PlanError(
            f"The run folder {run_dir} has characters that SLURM does not take as they are: "
            "letters, digits and any of _./=,+@:~- are fine. Try hydra.run.dir=my_run."
        )
    root = Path(__file__).resolve().parents[2]
    world = nodes.count * nodes.ranks_each
    options = "\n".join(f"#SBATCH {option}" for option in _options(config, run_dir, nodes))
    return f"""\
#!/bin/bash
# {config.mode} {config.schedule.name} pp={config.pp} dp={nodes.dp} tp={config.tp}: {world} ranks.
# Written by foldpipe; submitted with: sbatch {shlex.quote(str(run_dir / SCRIPT))}
{options}

run_dir={shlex.quote(str(run_dir))}
python={shlex.quote(sys.executable)}
cd {shlex.quote(str(cwd))} || exit 1
export PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}
umask 077

# scancel and an exceeded time limit signal this shell, too. It must live until the ranks have
# written their checkpoint, and must not requeue what somebody has cancelled.
cancelled=
trap 'cancelled=yes' TERM

# Finds the newest checkpoint of this folder, and a port on this node, where rank 0 will be.
rendezvous=$("$python" -m launcher.processes.slurm_job begin "$run_dir") || exit
export MASTER_ADDR=${{rendezvous%:*}} MASTER_PORT=${{rendezvous##*:}}

# One task per rank, in order over the nodes: tp innermost, pp outermost.
srun --kill-on-bad-exit=1 --wait=30 --distribution=block:block \\
  --output="$run_dir/logs/rank_%5t.log" --open-mode=append \\
  "$python" -m launcher.rank.slurm_rank "$run_dir" 2>> "$run_dir/logs/srun.log"
code=$?

# Writes result.json, and names the first failing rank.
"$python" -m launcher.processes.slurm_job end "$run_dir" "$code"
code=$?

# 85: the ranks were asked to stop, and have written a checkpoint.
if [ "$code" -eq 85 ] && [ -z "$cancelled" ]; then
  # The requeue ends this script; one that is gone before counts as a job that has failed.
  scontrol requeue "$SLURM_JOB_ID" && sleep 20
fi
exit "$code"
"""


def _options(config: LaunchConfig, run_dir: Path, nodes: Nodes) -> list[str]:
    cluster = config.cluster
    options = [
        f"--job-name={config.experiment_name}",
        f"--nodes={nodes.count}",
        f"--ntasks-per-node={nodes.ranks_each}",
    ]
    if cluster.gpus_per_node is not None:
        options.append(f"--gpus-per-node={cluster.gpus_per_node}")
    for name in ("partition", "time", "account"):
        value = getattr(cluster, name)
        if value is not None:
            options.append(f"--{name}={value}")
    return [
        *options,
        f"--output={run_dir}/slurm-%j.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=USR1@{cluster.signal_s}",
        *cluster.extra,
    ]


# Hands a job script to ``sbatch``: a list of arguments, never a line for a shell.

_TIMEOUT_S = 60


def find_sbatch() -> str:
    found = shutil.which("sbatch")
    if found is None:
        raise PlanError(
            "cluster=slurm needs sbatch, which is not on this machine's PATH. Try it on a login "
            "node, or cluster.submit=false, which only writes the script."
        )
    return found


def submit(script: Path) -> str:
    """Submits a script; returns the job's number."""
    try:
        done = subprocess.run(
            [find_sbatch(), "--parsable", str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"sbatch has not answered for {_TIMEOUT_S} s. Try squeue --me before you submit it "
            "again: the job may be there."
        ) from None
    job = done.stdout.strip().partition(";")[0]  # NUMBER[;CLUSTER]
    if done.returncode or not re.fullmatch(r"[0-9]+", job):
        said = " ".join((done.stderr or done.stdout).split())
        raise PlanError(
            f"sbatch has refused the job: {shorten(said, 300)}. Try sinfo, which lists partitions "
            "and their limits, and other cluster.* keys."
        )
    return job
