"""The ranks of benchmarks: how they start, and what a message between them takes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from strategies.costs.profile_file import Link
from strategies.profiling.link_times import fit_link
from strategies.runtime.messages.transport import SharedTransport, Transport
from tests.ranks.pool import Ranks

# Of the messages by which `busy_link` finds what one takes.
_SIZES = (2**14, 2**17, 2**20, 2**21)  # bytes
_MESSAGES = 15
_WARM_UPS = 3
_PAUSE_S = 10e-3  # as an instruction: what has been idle begins slowly


@contextmanager
def rank_pool(count: int, *, realtime: bool = False) -> Iterator[Ranks]:
    """Gloo ranks whose sleeps end on time.

    Args:
        count: Number of ranks.
        realtime: Put all threads of the ranks, the backend's too, before other programs.

    Raises:
        SystemExit: This user may not do that.
    """
    ranks = Ranks(count)
    try:
        if not all(ranks.run(prepare, realtime=realtime)):
            raise SystemExit("--realtime: this user may not set SCHED_FIFO. Leave it out.")
        yield ranks
    finally:
        ranks.close()


def prepare(*, realtime: bool) -> bool:
    """On a rank: see ``rank_pool``. Returns whether it has the priority that was asked for."""
    with suppress(OSError):
        # Linux lets a sleep last 50 us longer to save interrupts.
        Path("/proc/self/timerslack_ns").write_text("1")
    if realtime:
        try:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(10))
        except OSError:
            return False
    return True


@contextmanager
def own_core() -> Iterator[None]:
    """This rank stays on one core, if there is one for each rank."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= dist.get_world_size():
        os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def busy_link() -> Link:
    """What a message takes while every rank talks to both neighbours; the same on all ranks.

    Ranks of one machine end their instructions at about the same time, so their messages share its
    cores. Measured between two ranks while the others are silent, a message takes half as long.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)), backend="gloo")
    transport = SharedTransport(group, timeout_s=600.0)
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < size]
    times = []
    for length in _SIZES:
        taken = [_once(transport, neighbours, length) for _ in range(_MESSAGES)]
        own = torch.tensor(statistics.median(taken[_WARM_UPS:]), dtype=torch.float64)
        dist.all_reduce(own)
        times.append(float(own) / size)
    dist.barrier()  # No rank leaves before all have received everything.
    dist.destroy_process_group(group)
    return fit_link(_SIZES, times)


def _once(transport: Transport, neighbours: list[int], length: int) -> float:
    """Seconds until what all neighbours have sent is here."""
    leaving = torch.zeros(length // 4)
    dist.barrier()  # Of another group: in that of messages it may not end beside them.
    time.sleep(_PAUSE_S)
    begun = time.perf_counter()
    arriving = [
        transport.expect(leaving.shape, leaving.dtype, leaving.device, n, 0) for n in neighbours
    ]
    sent = [transport.send(leaving, n, 0) for n in neighbours]
    for arrival in arriving:
        arrival.wait()
    took = time.perf_counter() - begun
    for handle in sent:
        handle.wait()
    return took
