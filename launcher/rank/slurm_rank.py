"""One task of ``srun`` is one rank: ``python -m launcher.rank.slurm_rank RUN_DIR``.

The first lines take the signals, before anything that takes time is imported: SLURM sends SIGTERM
to preempt, and SIGUSR1 when the time limit comes near.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.checkpoints import hold
from launcher.processes.failure import write_failure
from launcher.processes.local import private_caches
from launcher.processes.preempted import StopRequest
from launcher.processes.store import listen_at
from launcher.processes.watchdog import fork_under_guard
from launcher.terminal import complain
from strategies.errors import PlanError

_NAMES = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "NODE_RANK": "SLURM_NODEID",
    "WORLD_SIZE": "SLURM_NTASKS",
}


def main() -> int:
    StopRequest().install(signal.SIGUSR1, signal.SIGTERM)
    os.environ.update(rank_environment(os.environ))
    try:
        store = _kept_store() if os.environ["RANK"] == "0" else None
    except PlanError as error:
        complain(f"error: {error}")
        return write_failure(Path(sys.argv[1]), 0, error)
    fork_under_guard(int(os.environ["RANK"]), store)
    from launcher.rank import worker

    if os.environ["RANK"] != "0":
        return worker.main()
    from launcher.processes.progress import ProgressView
    from launcher.processes.torchrun import events_told_to

    # An attempt before may still be ending.
    place = hold(Path(sys.argv[1]), wait_s=60.0)
    try:
        with place, ProgressView(enabled=True) as view, events_told_to(view):
            return worker.main()
    except PlanError as error:
        complain(f"error: {error}")
        return error.exit_code


def _kept_store() -> tuple[socket.socket, str] | None:
    """Where rank 0's guardian is to listen, with the job's token; None for an older script."""
    token = os.environ.get("FOLDPIPE_STORE")
    if token is None:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return listen_at(address, port), token
    except OSError as error:
        raise PlanError(
            f"port {port} at {address}, where the ranks are to meet, cannot be had: "
            f"{error.strerror}.",
            fix="It was free a moment ago: try `scontrol requeue "
            f"{os.environ.get('SLURM_JOB_ID', 'JOB')}`, or submit the job again.",
        ) from None


def rank_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What ``launcher.rank.worker`` reads, from what SLURM says of a task."""
    found = {"PYTHONUNBUFFERED": "1", **private_caches(given)}
    return found | {ours: given[theirs] for ours, theirs in _NAMES.items()}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the destructors of communicators, which may wait for peers that are gone.
    os._exit(code)
