"""Persistent gloo ranks for tests: each world is started once, and imports nothing by itself."""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from launcher.processes.rank_server import SHARED, ForkedRank, RankServer
from tests.warm_server import POOL_RANK, REPOSITORY, VARIABLES, rank_server_address

_DEADLINE_S = 150.0
_LISTENER = "TESTS_LISTENER"  # Has the descriptor of the socket on which rank 0 has its store.


class Ranks:
    """``world_size`` processes in one default group; runs functions by name on all of them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ends: list[Connection] = []
        self._processes: list[ForkedRank] = []
        with socket.socket() as listener:
            # Rank 0 inherits it: a port that was only looked for may be another's by then.
            listener.bind(("127.0.0.1", 0))
            listener.listen(world_size)
            for rank in range(world_size):
                self._start(rank, listener)

    def _start(self, rank: int, listener: socket.socket) -> None:
        ours, theirs = multiprocessing.Pipe()
        # Tensors are fetched with the key of the process that has made this rank.
        ours.send((self.world_size, bytes(multiprocessing.current_process().authkey)))
        address, port = listener.getsockname()
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        with theirs:
            files = {POOL_RANK: theirs.fileno()}
            if rank == 0:
                files[_LISTENER] = listener.fileno()
            self._processes.append(_server().start(REPOSITORY, VARIABLES | variables, 2, files))
        self._ends.append(ours)

    def run(
        self, function: Callable[..., Any], *, deadline_s: float = _DEADLINE_S, **arguments: Any
    ) -> list[Any]:
        """What ``function(**arguments)`` returns on each rank.

        Raises:
            AssertionError: It raised somewhere, or did not end; the ranks are gone then.
        """
        name = (function.__module__, function.__qualname__)
        self.wake()
        for end in self._ends:
            end.send((*name, arguments))
        until = time.monotonic() + deadline_s
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
        return all(process.poll() is None for process in self._processes)

    def rest(self) -> None:
        """Stops the processes while others work: gloo's threads look around 100 times a second."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for end in self._ends:
            end.close()


@functools.cache
def _server() -> RankServer:
    return RankServer(VARIABLES | {SHARED: rank_server_address()})


def serve_rank() -> None:
    """Runs what is asked for on this rank, until nobody is left who asks."""
    end = Connection(int(os.environ[POOL_RANK]))
    world_size, multiprocessing.current_process().authkey = end.recv()
    import warnings

    import torch
    import torch.distributed as dist
    from lightning.fabric.utilities import registry

    # Each Trainer looks through all installed packages for callbacks: an eighth of a small run.
    registry.entry_points = functools.cache(registry.entry_points)

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in (
        ".*LeafSpec.*",
        ".*Profiler clears events.*",  # torch 2.11, of what is read in the same cycle
        ".*num_workers.*",
        ".*many workers.*",
        ".*logging interval.*",
        ".*validation_step.*",
        ".*srun.*",  # a machine with SLURM on it
        ".*GPU available but not used.*",  # one with a GPU
        ".*no current CUDA context.*",  # an autograd thread's first product
        ".*control TF32 behavior.*",
        ".*unbatched P2P op.*",  # NCCL makes a pair's communicator at its first message
    ):
        warnings.filterwarnings("ignore", message=message)
    if world_size > 1:
        listener = os.environ.get(_LISTENER)
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=listener is not None,
            master_listen_fd=None if listener is None else int(listener),
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
    while True:
        try:
            module, name, arguments = end.recv()
        except EOFError:
            return
        try:
            target: Any = importlib.import_module(module)
            for part in name.split("."):
                target = getattr(target, part)
            end.send(("ok", target(**arguments)))
        except BaseException:
            end.send(("error", traceback.format_exc()))
        # A trainer is part of a circle, and holds gloo groups, whose threads look around.
        target = arguments = None
        gc.collect(1)
