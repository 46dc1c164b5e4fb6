"""What the job script does before and after the ranks, on the job's first node. Torch-free.

``begin RUN_DIR`` makes the task ready for this attempt and prints address, port and token of the
store where ranks will meet; ``end RUN_DIR CODE`` writes result.json and tells how the run ended.
A script that is killed does neither: ``settle`` is for whoever comes by later.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.checkpoints import is_remembered, newest_in, remember_damage
from launcher.commands.ranks import failure_recorded, find_checkpoint
from launcher.config.key import typed
from launcher.processes.failure import Failure, describe, first_failure, read_failure
from launcher.processes.local import OUTCOME, take_outcome
from launcher.processes.preempted import PreemptedError
from launcher.processes.store import meeting_address
from launcher.processes.task import JOB_FILE, read_task, resolve_task, rewrite_task, task_umask
from launcher.report.predicted import run_mapping
from launcher.report.result import write_result
from launcher.terminal import complain, say, shortened
from strategies.errors import DamagedCheckpointError, PipelineError, RunError
from strategies.small_file import FileRefusedError, read_text

# mode -> where its ``finish`` is.
_FINISH = MappingProxyType(
    {
        "train": "launcher.commands.train",
        "eval": "launcher.commands.evaluate",
        "predict": "launcher.commands.evaluate",
    }
)
# srun: error: n1: tasks 2-3: Exited with exit code 85
AGAIN = 75
# There while an attempt has begun and not ended.
_ATTEMPT = "attempt_began"
_MOST_BYTES = 4096
_ALIVE = (
    "PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD",
    "REQUEUE_FED", "RESIZING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "RESV_DEL_HOLD",
)  # fmt: skip
_SRUN_LINE = re.compile(r"srun: error: (\S+): tasks? ([0-9]+)[0-9,-]*: (.*)")


def begin(run_dir: Path) -> str:
    """Prepares one attempt.

    A requeued job goes on with the newest whole checkpoint that it has written itself; before there
    is one, with what the command line has asked for. Those that ranks have found damaged are none.
    """
    task = read_task(run_dir)
    if task["config"]["mode"] == "train":
        own = newest_in(run_dir, skipped=complain)
        if own is not None:
            task["checkpoint"] = str(own)
        elif task["checkpoint"] is not None and is_remembered(Path(task["checkpoint"])):
            run = resolve_task(task)
            found = find_checkpoint(run, run.config.trainer.resume, run_dir, optional=True)
            task["checkpoint"] = None if found is None else str(found)
        rewrite_task(run_dir, task)
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    for stale in (run_dir / OUTCOME, *logs.glob("rank_*.error.json"), logs / "srun.log"):
        stale.unlink(missing_ok=True)
    (run_dir / _ATTEMPT).touch()
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    complain(
        f"attempt {attempt} of job {os.environ.get('SLURM_JOB_ID')} on "
        f"{os.environ.get('SLURM_JOB_NODELIST')}: "
        + ("starts anew" if task["checkpoint"] is None else f"continues {task['checkpoint']}")
    )
    alone = os.environ.get("SLURM_NNODES") == "1"
    return f"{meeting_address(_name(), alone=alone)} {_free_port()} {secrets.token_hex(16)}"


def end(run_dir: Path, code: int) -> int:
    """Looks at what the ranks left.

    Returns:
        0 done, 1 failed, 85 preempted with a checkpoint, 75 to begin again: the ranks have found
        the checkpoint damaged, and nobody has asked for that one by name.
    """
    task = read_task(run_dir)
    if code and _found_damaged(run_dir, task):
        return AGAIN
    run = resolve_task(task)
    try:
        with failure_recorded(run_dir / "result.json", run_mapping(run)):
            outcome = _outcome(run_dir, run.world_size, code)
    except RunError as error:
        say(str(error) if isinstance(error, PreemptedError) else f"error: {error}")
        return error.exit_code
    else:
        finish = importlib.import_module(_FINISH[run.config.mode]).finish
        done = finish(run, run_dir, outcome)
        assert isinstance(done, int)
        return done
    finally:
        (run_dir / _ATTEMPT).unlink(missing_ok=True)


def _found_damaged(run_dir: Path, task: dict[str, Any]) -> bool:
    """Whether the ranks have refused a checkpoint that was chosen for them; it is skipped then."""
    world = range(resolve_task(task).world_size)
    failures = [f for rank in world if (f := read_failure(run_dir, rank)) is not None]
    refused = [f for f in failures if f.kind == DamagedCheckpointError.__name__]
    if not refused:
        return False
    chosen = Path(task["checkpoint"])
    asked = task["config"]["trainer"]["resume"]
    if asked != "auto" and not chosen.is_relative_to(run_dir):
        return False
    complain(f"skips {chosen}: {refused[0].message}")
    return remember_damage(chosen, refused[0].message)


def settle(run_dir: Path) -> str | None:
    """Writes result.json for a job that is gone and has written none; returns what it says.

    None where there is nothing to settle, or SLURM does not answer here.
    """
    try:
        job = read_text(run_dir / JOB_FILE, most_bytes=_MOST_BYTES).strip()
    except (OSError, FileRefusedError):
        return None
    result = run_dir / "result.json"
    if result.is_file() and not (run_dir / _ATTEMPT).is_file():
        return None
    state = _state(job)
    if state is None or state in _ALIVE:
        return None
    if state == "COMPLETED" and result.is_file():
        (run_dir / _ATTEMPT).unlink(missing_ok=True)
        return None
    task = read_task(run_dir)
    before = os.umask(task_umask(task))
    try:
        return _settled(run_dir, task, f"SLURM job {job} has ended ({state})")
    finally:
        os.umask(before)


def _settled(run_dir: Path, task: dict[str, Any], ends: str) -> str:
    run = resolve_task(task)
    if (run_dir / OUTCOME).is_file():
        end(run_dir, 0)
        return f"{ends} before its script could say how; the ranks had"
    own = newest_in(run_dir, skipped=complain) if run.config.mode == "train" else None
    on = (
        ""
        if own is None
        else f" Its newest checkpoint is {own}: try {typed('trainer.resume', str(own))}."
    )
    failures = [f for r in range(run.world_size) if (f := read_failure(run_dir, r)) is not None]
    first = first_failure(failures) if failures else None
    told = f"{ends}, and its script was ended before it could say how. {_last_words(run_dir)}{on}"
    if first is not None:
        told = f"{describe(first, run_dir / 'logs' / f'rank_{first.rank:05d}.log')}\n{ends}.{on}"
    known: dict[str, object] = {} if own is None else {"checkpoint": str(own)}
    write_result(
        run_dir / "result.json",
        {**run_mapping(run), "status": "failed", "error": told, **known},
    )
    (run_dir / _ATTEMPT).unlink(missing_ok=True)
    return told


def _last_words(run_dir: Path) -> str:
    logs = sorted(run_dir.glob("slurm-*.out"), key=lambda file: file.stat().st_mtime)
    lines = logs[-1].read_text(errors="replace").splitlines() if logs else []
    said = [line for line in lines if line.strip()]
    return f"Its last words: {shortened(said[-1], 300)}" if said else "It has said nothing."


def _state(job: str) -> str | None:
    """What SLURM says of a job; None where it does not answer."""
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bJobState=([A-Z_]+)", done.stdout)
    if found:
        return found[1]
    return "no longer known" if "Invalid job id" in done.stderr else None


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


def _name() -> str:
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
    try:
        os.umask(task_umask(read_task(Path(sys.argv[2]))))
        if sys.argv[1] == "begin":
            say(begin(Path(sys.argv[2])))
            return 0
        return end(Path(sys.argv[2]), int(sys.argv[3]))
    except PipelineError as error:
        complain(f"error: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
