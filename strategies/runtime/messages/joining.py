"""How ranks find each other: a store, a roll call that names who is missing, and then the groups.

torch's own rendezvous says how many ranks have come, not which; and of a taken port, that it is.
What decides the groups' backend is compared over the store, too: there is no group yet.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from strategies.errors import PlanError, RunError, by_host, name_ranks, without_stack
from strategies.plan import Backend

_log = logging.getLogger(__name__)

_LOOK_S = 0.05


def join(
    *, rank: int, world_size: int, address: str, port: int, timeout_s: float
) -> tuple[Store, dict[int, str]]:
    """Reaches the store of this world, and returns when all ranks have.

    Where whoever has started the ranks keeps a store (torchrun's agent, or a parent that gives its
    store's token in ``FOLDPIPE_STORE``), that one is used; otherwise rank 0 makes it.

    Returned are the store, under a name of its own for this attempt, and each rank's host.

    Raises:
        PlanError: The port is taken; names the holder.
        RunError: Ranks have not come; names them.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    master = rank == 0 and not agent and "FOLDPIPE_STORE" not in os.environ
    if not master:
        _reach(rank, address, port, timeout_s)
    token = os.environ.get("FOLDPIPE_STORE", "")  # that store takes no key without it
    place = f"{token}/foldpipe/{attempt}" if token else f"foldpipe/{attempt}"
    store = PrefixStore(place, _store(address, port, timeout_s, master=master))
    return store, call_roll(store, rank=rank, world_size=world_size, timeout_s=timeout_s)


def call_roll(store: Store, *, rank: int, world_size: int, timeout_s: float) -> dict[int, str]:
    """Returns when all ranks have come to this store: each rank's host.

    Raises:
        RunError: Ranks have not come; names them.
    """
    began = time.monotonic()
    store.set(f"here/{rank}", socket.gethostname())
    missing = list(range(world_size))
    while missing:
        try:
            missing = [other for other in missing if not store.check([f"here/{other}"])]
        except RuntimeError as error:
            # Rank 0 has given up a moment earlier, and its list is gone.
            raise RunError(
                f"rank 0, which kept the list of ranks, has left; {name_ranks(missing)} had not "
                f"come by then ({str(error).splitlines()[0]})"
            ) from None
        if missing and time.monotonic() - began > timeout_s:
            raise RunError(_absent(missing, store, world_size, timeout_s))
        if missing:
            time.sleep(_LOOK_S)
    store.set_timeout(timedelta(seconds=timeout_s))
    return _hosts(store, range(world_size))


_BROKEN = re.compile("(?i)connect|broken pipe|socket closed|timed? ?out|GLHF")


@contextmanager
def connecting() -> Iterator[None]:
    """Around what connects ranks that have all come to the store; gloo's error names no cause.

    Gloo's ports are open while ranks connect, and take whichever connection sends the right eight
    bytes first.

    Raises:
        RunError: A connection broke meanwhile.
    """
    try:
        yield
    except RuntimeError as error:
        said = without_stack(str(error)).partition("\n")[0]
        if not _BROKEN.search(said):
            raise
        # "another rank failed" is how the launcher tells consequences from causes.
        raise RunError(
            f"a connection to another rank broke while ranks connected ({said}): another rank "
            "failed, or another process has connected to a port of gloo's in a rank's place. If "
            "no rank says why it ended, start again, on a machine or network without other users."
        ) from error


def ranks_gpus(store: Store, device: torch.device, *, rank: int, world_size: int) -> list[str]:
    """Each rank's GPU, by its UUID, before ranks have a group."""
    store.set(f"gpu/{rank}", uuid_of(device))
    return [store.get(f"gpu/{other}").decode() for other in range(world_size)]


def uuid_of(device: torch.device) -> str:
    """Tells GPUs apart; where each process sees one GPU, all of them are ``cuda:0``."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpu_backend(gpus: Sequence[str], *, rank: int) -> Backend:
    """What ``backend=auto`` takes for ranks on these GPUs: NCCL refuses two ranks on one."""
    count, different = len(gpus), len(set(gpus))
    if count == different:
        _log.info("backend=auto: nccl, because %d ranks have a GPU each.", count)
        return "nccl"
    if rank == 0:
        _log.warning(
            "backend=auto: shared (through the memory of the GPU), because %d ranks share %d GPU%s "
            "and NCCL needs a GPU per rank.",
            count,
            different,
            "s" * (different > 1),
        )
    return "shared"


def _reach(rank: int, address: str, port: int, timeout_s: float) -> None:
    """Waits for the store; torch's client would look for its words for seconds more."""
    until = time.monotonic() + timeout_s
    while True:
        left = until - time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=max(left, _LOOK_S)):
                return
        except OSError as error:
            if left <= 0:
                raise RunError(
                    f"rank 0 has not come within {timeout_s:g} s (cluster.timeout_s): nobody "
                    f"answers at {address}:{port}, where it keeps the list of ranks ({error}). "
                    f"Rank {rank} on {socket.gethostname()} is here."
                ) from None
        time.sleep(_LOOK_S)


def _store(address: str, port: int, timeout_s: float, *, master: bool) -> Store:
    try:
        return TCPStore(
            address,
            port,
            is_master=master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # torchrun's processes have met before, on the same port.
            multi_tenant=True,
        )
    except RuntimeError as error:
        if master and "EADDRINUSE" in str(error):
            raise PlanError(_taken(port)) from None
        raise


def _absent(missing: list[int], store: Store, world_size: int, timeout_s: float) -> str:
    here = _hosts(store, [rank for rank in range(world_size) if rank not in missing])
    has = "has" if len(missing) == 1 else "have"
    present = "is" if len(here) == 1 else "are"
    return (
        f"{name_ranks(missing)} {has} not come within {timeout_s:g} s (cluster.timeout_s); "
        f"here {present} {by_host(here)}"
    )


def _hosts(store: Store, ranks: Iterable[int]) -> dict[int, str]:
    return {rank: store.get(f"here/{rank}").decode(errors="replace") for rank in ranks}


def _taken(port: int) -> str:
    import psutil

    holder = "another process"
    try:
        for found in psutil.net_connections("tcp"):
            if found.laddr and found.laddr.port == port and found.status == psutil.CONN_LISTEN:
                pid = found.pid
                if pid is not None:
                    holder = f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})"
                break
    except psutil.Error:
        pass  # of somebody else: the kernel does not tell
    return (
        f"port {port} on {socket.gethostname()}, where the ranks are to meet, is taken by "
        f"{holder}. End it, or try another port: MASTER_PORT, --master-port, cluster.master."
    )
