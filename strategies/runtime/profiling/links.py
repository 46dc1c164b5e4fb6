"""What messages and all-reduces between two ranks take: latency and bandwidth.

Messages go through the runtime's own transport, there and back; a reduction is one of two ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.costs.profile import Link
from strategies.runtime.transport import (
    GlooTransport,
    NcclTransport,
    StagedTransport,
    Transport,
)

_SIZES = (2**10, 2**14, 2**17, 2**20, 2**22)  # bytes
_REPETITIONS = 12
_WARM_UPS = 3


def measure_links(
    first: int, second: int, *, backend: str, device: torch.device
) -> tuple[Link, Link] | None:
    """Measures between two global ranks; collective over all.

    Returns:
        (messages, reductions) on the two ranks; None on others.
    """
    members = sorted({first, second})
    kind = "nccl" if backend == "nccl" else "gloo"
    group = dist.new_group(members, backend=kind)
    # NCCL pairs messages by their order per communicator: one for each direction.
    pairs = [dist.new_group(members, backend=kind) for _ in range(2)] if kind == "nccl" else []
    rank = dist.get_rank()
    if rank not in members:
        return None
    own = members.index(rank)
    transport: Transport
    if backend == "nccl":
        transport = NcclTransport(lambda source, target: pairs[source < target], own)
    else:
        transport = (StagedTransport if backend == "staged" else GlooTransport)(group)
    messages = _fitted(device, partial(_there_and_back, transport, own), trips=2)
    reductions = _fitted(device, partial(_reduce, group), trips=1)
    dist.barrier(group)
    for made in (group, *pairs):
        dist.destroy_process_group(made)
    # A ring of two moves the whole once, in two steps.
    return messages, Link(reductions.latency_s / 2, reductions.bandwidth)


def _fitted(device: torch.device, call: Callable[[Tensor], None], *, trips: int) -> Link:
    times = []
    for size in _SIZES:
        data = torch.zeros(size // 4, device=device)
        found = []
        for _ in range(_WARM_UPS + _REPETITIONS):
            begun = time.perf_counter()
            call(data)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append((time.perf_counter() - begun) / trips)
        times.append(statistics.median(found[_WARM_UPS:]))
    # The slope between the largest, the latency of the smallest: a line through all would give the
    # smallest, which are most messages' latency, next to no weight.
    moved = _SIZES[-1] - _SIZES[-2]
    slope = max((times[-1] - times[-2]) / moved, 1e-15)
    return Link(max(0.0, times[0] - _SIZES[0] * slope), 1.0 / slope)


def _there_and_back(transport: Transport, own: int, data: Tensor) -> None:
    answer = torch.empty_like(data)
    if own == 0:
        sent = transport.send(data, 1, 0)
        transport.receive(answer, 1, 1).wait()
        sent.wait()
    else:
        transport.receive(answer, 0, 0).wait()
        transport.send(data, 0, 1).wait()


def _reduce(group: dist.ProcessGroup, data: Tensor) -> None:
    dist.all_reduce(data, group=group)
