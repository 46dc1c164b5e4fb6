"""Hands a job script to ``sbatch``: a list of arguments, never a line for a shell."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from launcher.config.key import shorten
from strategies.errors import PlanError

_TIMEOUT_S = 60


def find_sbatch() -> str:
    """The program's path.

    Raises:
        PlanError: This machine has none.
    """
    found = shutil.which("sbatch")
    if found is None:
        raise PlanError(
            "cluster=slurm needs sbatch, which is not on this machine's PATH. Try it on a login "
            "node, or cluster.submit=false, which only writes the script."
        )
    return found


def submit(script: Path) -> str:
    """Submits a script; returns the job's number.

    Raises:
        PlanError: SLURM has refused it; with its own words.
    """
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
