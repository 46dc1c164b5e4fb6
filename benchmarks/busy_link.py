"""What a message takes in a pipeline: while every rank talks to both of its neighbours.

Ranks of one machine end their instructions at about the same time, so their messages share its
cores. Measured between two ranks while the others are silent, a message takes half as long.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from strategies.costs.profile_file import Link
from strategies.profiling.link_times import fit_link
from strategies.runtime.messages.transport import SharedTransport, Transport

_SIZES = (2**14, 2**17, 2**20, 2**21)  # bytes
_REPETITIONS = 15
_WARM_UPS = 3
_PAUSE_S = 10e-3  # as an instruction: what has been idle begins slowly


def busy_link() -> Link:
    """Collective over all ranks, and the same on all of them: messages on this machine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)), backend="gloo")
    transport = SharedTransport(group, timeout_s=600.0)
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < size]
    times = []
    for length in _SIZES:
        taken = [_once(transport, neighbours, length) for _ in range(_REPETITIONS)]
        own = torch.tensor(statistics.median(taken[_WARM_UPS:]), dtype=torch.float64)
        dist.all_reduce(own)
        times.append(float(own) / size)
    dist.barrier()  # Nobody leaves before all have heard everything.
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
