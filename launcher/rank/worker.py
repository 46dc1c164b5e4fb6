"""One rank: reads the resolved configuration, trains or evaluates, leaves its results.

Started as ``python -m launcher.rank.worker RUN_DIR`` by a process launcher, or forked from
``launcher.rank.fork_server``, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
Never sees Hydra.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from launcher.processes.failure import explained, write_failure
from launcher.processes.preempted import PreemptedError, StopRequest, installed_request
from launcher.processes.watchdog import own_heartbeat
from launcher.secrets import MaskedStream
from strategies.errors import PipelineError

_PR_SET_PDEATHSIG = 1
_JOBS = {
    "run": "launcher.rank.jobs",
    "code": "launcher.rank.own_parts",
    "calibration": "launcher.rank.profile_job",
}


def main() -> int:
    """Runs this rank; returns its exit code."""
    parent = os.environ.get("FOLDPIPE_PARENT")
    die_with(None if parent is None else int(parent))
    # What a user's model prints, and every traceback, ends in a log.
    sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)
    return run_rank(Path(sys.argv[1]))


def run_rank(run_dir: Path) -> int:
    """What is the same for a rank that was started and for one that was forked."""
    faulthandler.enable()
    os.umask(0o077)
    rank = int(os.environ["RANK"])
    request = installed_request()
    if request is None:
        heartbeat = own_heartbeat(os.environ)
        # The parent decides how a run ends; launcher.rank.callbacks.KeepSignal holds on to this.
        request = StopRequest(leaves=lambda: heartbeat.told_to_leave)
        request.install(signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    try:
        task = importlib.import_module("launcher.processes.task").read_task(run_dir)
        if task["config"]["mode"] != "train":
            request.disregard()
        jobs = importlib.import_module(_JOBS[task.get("job", "run")])
        jobs.run(task, run_dir)
    except KeyboardInterrupt:
        return 130
    except PreemptedError as error:
        return error.exit_code
    except PipelineError as error:
        code = write_failure(run_dir, rank, error, own_heartbeat(os.environ))
        with contextlib.suppress(OSError):  # a full disk
            sys.stderr.write(f"error: {error}\n")
        return code
    except BaseException as error:
        known = explained(error, run_dir)
        code = write_failure(run_dir, rank, known or error, own_heartbeat(os.environ))
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return code
    return 0


def die_with(parent: int | None) -> None:
    """Asks the kernel to end this process with its parent, and checks that it is still there."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)


def leave(code: int) -> NoReturn:
    """Ends this process without destructors of communicators, which may wait for lost peers."""
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
