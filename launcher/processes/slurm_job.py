"""What the job script does before and after the ranks, on the job's first node. Torch-free.

``begin RUN_DIR`` makes the task ready for this attempt and prints HOST:PORT; ``end RUN_DIR CODE``
writes result.json and tells how the run ended.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.checkpoints import newest_in
from launcher.commands.ranks import failure_recorded
from launcher.processes.failure import Failure, describe, first_failure, read_failure
from launcher.processes.local import OUTCOME, take_outcome
from launcher.processes.preempted import PreemptedError
from launcher.processes.task import read_task, resolve_task, rewrite_task
from launcher.report.predicted import run_mapping
from launcher.terminal import complain, say
from strategies.errors import PipelineError, RunError

# mode -> where its ``finish`` is.
_FINISH = MappingProxyType(
    {
        "train": "launcher.commands.train",
        "eval": "launcher.commands.evaluate",
        "predict": "launcher.commands.evaluate",
    }
)
# srun: error: n1: tasks 2-3: Exited with exit code 85
_SRUN_LINE = re.compile(r"srun: error: (\S+): tasks? ([0-9]+)[0-9,-]*: (.*)")


def begin(run_dir: Path) -> str:
    """Prepares one attempt.

    A requeued job goes on with the newest whole checkpoint that it has written itself; before there
    is one, with what the command line has asked for.
    """
    task = read_task(run_dir)
    own = newest_in(run_dir, skipped=complain) if task["config"]["mode"] == "train" else None
    if own is not None:
        task["checkpoint"] = str(own)
        rewrite_task(run_dir, task)
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    for stale in (run_dir / OUTCOME, *logs.glob("rank_*.error.json"), logs / "srun.log"):
        stale.unlink(missing_ok=True)
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    complain(
        f"attempt {attempt} of job {os.environ.get('SLURM_JOB_ID')} on "
        f"{os.environ.get('SLURM_JOB_NODELIST')}: "
        + ("starts anew" if task["checkpoint"] is None else f"continues {task['checkpoint']}")
    )
    return f"{_address()}:{_free_port()}"


def end(run_dir: Path, code: int) -> int:
    """Looks at what the ranks left; 0 done, 1 failed, 85 preempted with a checkpoint."""
    task = read_task(run_dir)
    run = resolve_task(task)
    try:
        with failure_recorded(run_dir / "result.json", run_mapping(run)):
            outcome = _outcome(run_dir, run.world_size, code)
    except RunError as error:
        say(str(error) if isinstance(error, PreemptedError) else f"error: {error}")
        return error.exit_code
    finish = importlib.import_module(_FINISH[run.config.mode]).finish
    done = finish(run, run_dir, outcome)
    assert isinstance(done, int)
    return done


def _first_srun_error(text: str) -> tuple[int, str, str] | None:
    """The first task that srun has complained about, its host, and how it ended.

    >>> _first_srun_error("srun: error: n1: tasks 2-3: Killed")
    (2, 'n1', 'Killed')
    """
    found = _SRUN_LINE.search(text)
    return None if found is None else (int(found[2]), found[1], found[3])


def _outcome(run_dir: Path, world_size: int, code: int) -> dict[str, Any]:
    if (run_dir / OUTCOME).is_file():
        # Of ranks that stop with 85, the first to end has srun kill those that are still about to:
        # the checkpoint is committed before any of them ends.
        outcome = take_outcome(run_dir)
        if code == 0:
            return outcome
    raise RunError(_blame(run_dir, world_size, code))


def _blame(run_dir: Path, world_size: int, code: int) -> str:
    logs = run_dir / "logs"
    failures = [f for rank in range(world_size) if (f := read_failure(run_dir, rank)) is not None]
    log = logs / "srun.log"
    said = log.read_text(errors="replace") if log.is_file() else ""
    named = _first_srun_error(said)
    if named is not None and named[0] not in {failure.rank for failure in failures}:
        rank, host, how = named
        # A task that was killed cannot say anything; its peers can only say that it is gone.
        failures.append(Failure(rank, host, time.time(), "srun", how, -1))
    if not failures:
        last = " ".join(said.split())[-300:]
        return f"srun has ended with exit code {code}, and no rank has said why: {last}"
    failure = first_failure(failures)
    return describe(failure, logs / f"rank_{failure.rank:05d}.log")


def _address() -> str:
    """This node as the others reach it: SLURM knows, its node names need not resolve."""
    name = os.environ.get("SLURMD_NODENAME", "")
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    found = re.search(r"\bNodeAddr=([A-Za-z0-9_.-]+)", shown)
    return found[1] if found else name or socket.gethostname()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    os.umask(0o077)
    try:
        if sys.argv[1] == "begin":
            say(begin(Path(sys.argv[2])))
            return 0
        return end(Path(sys.argv[2]), int(sys.argv[3]))
    except PipelineError as error:
        complain(f"error: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
