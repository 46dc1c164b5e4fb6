"""Persistent gloo ranks for tests: each world is started once, and imports nothing by itself."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from launcher.processes.rank_server import SHARED, ForkedRank, RankServer
from tests.ranks.rank_server import POOL_RANK, REPOSITORY, VARIABLES, rank_server_address

_DEADLINE_S = 150.0
_RELEASED_S = 10.0  # One has failed: for that long the others may wait for it.


class RankTraceback(Exception):  # noqa: N818 -- the cause of an error, as concurrent.futures has it
    """Where an error of a rank was raised; pytest shows it above the error."""


class Ranks:
    """``world_size`` processes in one default group; runs functions by name on all of them.

    A function that raises leaves the ranks usable: they leave their groups, which releases those
    that wait for another, and make a new default group. A rank that dies or hangs is replaced.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ends: dict[int, Connection] = {}
        self._processes: dict[int, ForkedRank] = {}
        for rank in range(world_size):
            self._start(rank)
        self._join()

    def _start(self, rank: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        with theirs:
            files = {POOL_RANK: theirs.fileno()}
            started = _server().start(REPOSITORY, VARIABLES | variables, 2, files)
        self._processes[rank], self._ends[rank] = started, ours

    def _join(self) -> None:
        """Makes the default group; rank 0 tells where it has the store."""
        place = ("127.0.0.1", 0)
        for rank, end in sorted(self._ends.items()):
            end.send(("join", self.world_size, *place))
            if rank == 0:
                place = end.recv()
        self._joining = set(self._ends.values())

    def _wait_for_join(self) -> None:
        """Ranks that were stopped before they have met would find their time up when they go on."""
        while self._joining:
            end = self._joining.pop()
            with contextlib.suppress(EOFError, ConnectionError):  # ``alive`` tells.
                end.recv()

    def run(
        self, function: Callable[..., Any], *, deadline_s: float = _DEADLINE_S, **arguments: Any
    ) -> list[Any]:
        """What ``function(**arguments)`` returns on each rank.

        Raises:
            BaseException: It raised this on a rank, before others failed or were released.
            AssertionError: It has not ended in time on some ranks, or they have died.
        """
        results, errors = self._answers(function, deadline_s, arguments)
        if errors:
            raise errors[min(errors, key=lambda rank: errors[rank][0])][1]
        return [results[rank] for rank in range(self.world_size)]

    def refusals(self, function: Callable[..., Any], **arguments: Any) -> list[BaseException]:
        """What ``function(**arguments)`` raises on each rank; it must do so on all."""
        results, errors = self._answers(function, _DEADLINE_S, arguments)
        assert not results, f"ranks {sorted(results)} of {self.world_size} raise nothing"
        return [errors[rank][1] for rank in range(self.world_size)]

    def _answers(
        self, function: Callable[..., Any], deadline_s: float, arguments: dict[str, Any]
    ) -> tuple[dict[int, Any], dict[int, tuple[float, BaseException]]]:
        """What the ranks return, and what they raise with its time, by rank."""
        self.wake()
        self._wait_for_join()
        # By value: to pass a tensor on by its descriptor takes a listener, and a folder for it.
        command = pickle.dumps(("run", _module(function), function.__qualname__, arguments))
        for end in self._ends.values():
            end.send_bytes(command)
        until = time.monotonic() + deadline_s
        results: dict[int, Any] = {}
        errors: dict[int, tuple[float, BaseException]] = {}
        missing = {end: rank for rank, end in self._ends.items()}
        lost: dict[int, str] = {}
        apart = False  # whether the function has ended its group: a fit that failed does
        while missing and (ready := wait(list(missing), max(0.0, until - time.monotonic()))):
            for end in [end for end in missing if end in ready]:
                rank = missing.pop(end)
                try:
                    raised_at, answer, connected = end.recv()
                except (EOFError, ConnectionError):
                    lost[rank] = "died"
                    raised_at = time.monotonic()
                else:
                    apart |= not connected
                    if raised_at is None:
                        results[rank] = pickle.loads(answer)
                    else:
                        errors[rank] = raised_at, _error(answer, rank)
                if raised_at is not None:
                    until = min(until, time.monotonic() + _RELEASED_S)
        lost |= dict.fromkeys(missing.values(), "hung, and was killed")
        if lost or errors or apart:
            self._renew(lost)
        for rank, how in lost.items():
            # The cause of a hanging rank is what another one has raised, if any has.
            first = time.monotonic() if how.startswith("hung") else 0.0
            errors[rank] = first, AssertionError(f"rank {rank} of {self.world_size} {how}")
        return results, errors

    def _renew(self, lost: dict[int, str]) -> None:
        """Ranks that were lost are replaced; all make a new default group."""
        for rank in lost:
            self._processes[rank].send_signal(signal.SIGKILL)
            self._processes[rank].wait()
            self._ends[rank].close()
            self._start(rank)
        self._join()

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes.values())

    def rest(self) -> None:
        """Stops the processes while others work: gloo's threads look around 100 times a second."""
        self._wait_for_join()
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            process.send_signal(number)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        for end in self._ends.values():
            end.close()


def _module(function: Callable[..., Any]) -> str:
    """Where ranks find it: a command's own functions are in ``__main__`` only here."""
    spec = sys.modules[function.__module__].__spec__
    return function.__module__ if spec is None else spec.name


def _error(answer: bytes, rank: int) -> BaseException:
    error, text = pickle.loads(answer)
    assert isinstance(error, BaseException)
    error.__cause__ = RankTraceback(f"rank {rank}\n{text}")
    return error


@functools.cache
def _server() -> RankServer:
    return RankServer(VARIABLES | {SHARED: rank_server_address()})


# ------------------------------------------------------------------------------------ on the ranks


def serve_rank() -> None:
    """Runs what is asked for on this rank, until nobody is left who asks."""
    end = Connection(int(os.environ[POOL_RANK]))
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
    keeps: Any = None
    size = 1
    with contextlib.suppress(EOFError):
        while True:
            command, *words = end.recv()
            if command == "join":
                _leave()
                size = words[0]
                keeps = _join(end, *words)
                end.send(None)
            else:
                answer = _answer(*words)
                end.send((*answer, size == 1 or dist.is_initialized()))
                # A trainer is part of a circle, and holds gloo groups, whose threads look around.
                gc.collect(1)
    del keeps


def _join(end: Connection, world_size: int, address: str, port: int) -> Any:
    """Makes this rank a member of a default group; returns its store, which rank 0 has for all."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0, wait_for_workers=False)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(store.port))
    if rank == 0:
        end.send((address, store.port))
    if world_size > 1:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
    return store


def _leave() -> None:
    """Closes this rank's connections, which releases all ranks that wait for it."""
    import torch.distributed as dist

    from strategies.runtime.messages.meeting import meeting

    gc.collect()
    meeting().end()  # It holds the group of a fit, which gloo would keep open.
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(module: str, name: str, arguments: dict[str, Any]) -> tuple[float | None, bytes]:
    """What a function returns, or when it raised what; by value, as what it is given."""
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        return None, pickle.dumps(target(**arguments))
    except BaseException as error:
        raised_at, text = time.monotonic(), traceback.format_exc()
        told = _told(error, text)
    finally:
        os.environ.pop("PL_GLOBAL_SEED", None)  # The next test has not seeded.
    _leave()
    return raised_at, told


def _told(error: BaseException, text: str) -> bytes:
    """The error itself, where it can be sent; its frames stay here, and end here."""
    traceback.clear_frames(error.__traceback__)
    try:
        told = pickle.dumps((error, text))
        pickle.loads(told)
    except Exception:
        told = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))
    return told
