"""Persistent gloo ranks for tests: importing Lightning costs seconds, so it is imported once."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

_DEADLINE_S = 150.0
# What ranks share instead of importing it each; none of it starts a thread that a fork would lose.
_IMPORTED_ONCE = ["pytest", "launcher.rank.jobs", "launcher.workloads.hf.hf_model"]


@functools.cache
def _context() -> ForkServerContext:
    """Forks ranks from one process that has done nothing but import."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_IMPORTED_ONCE)
    known = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # Read when torch is loaded.
    try:
        forkserver.ensure_running()
    finally:
        if known is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = known
    return found


class Ranks:
    """``world_size`` processes in one default group; runs functions by name on all of them."""

    def __init__(self, world_size: int) -> None:
        context = _context()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.world_size = world_size
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, port), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What ``function(**arguments)`` returns on each rank.

        Raises:
            AssertionError: It raised somewhere, or did not end; the ranks are gone then.
        """
        name = (function.__module__, function.__qualname__)
        self.wake()
        for end in self._ends:
            end.send((*name, arguments))
        until = time.monotonic() + _DEADLINE_S
        answers: list[Any] = [None] * self.world_size
        missing = set(range(self.world_size))
        while missing:
            for rank in sorted(missing):
                if self._ends[rank].poll(0.01):
                    answers[rank] = self._ends[rank].recv()
                    missing.discard(rank)
                    if answers[rank][0] == "error":
                        until = min(until, time.monotonic() + 5.0)
            if missing and time.monotonic() > until:
                break
        failed = [f"rank {r}: {a[1]}" for r, a in enumerate(answers) if a and a[0] == "error"]
        if failed or missing:
            self.close()
            silent = f"ranks {sorted(missing)} did not answer\n" if missing else ""
            raise AssertionError(silent + "\n".join(failed))
        return [answer[1] for answer in answers]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def rest(self) -> None:
        """Stops the processes while others work: gloo's threads look around 100 times a second."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(end: Connection, rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import warnings

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in (
        ".*LeafSpec.*",
        ".*num_workers.*",
        ".*many workers.*",
        ".*logging interval.*",
        ".*validation_step.*",
        ".*srun.*",  # a machine with SLURM on it
        ".*GPU available but not used.*",  # one with a GPU
        ".*no current CUDA context.*",  # an autograd thread's first product
        ".*control TF32 behavior.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
    while True:
        try:
            module, name, arguments = end.recv()
        except EOFError:
            sys.exit(0)
        try:
            target: Any = importlib.import_module(module)
            for part in name.split("."):
                target = getattr(target, part)
            end.send(("ok", target(**arguments)))
        except BaseException:
            end.send(("error", traceback.format_exc()))
