"""What messages and all-reduces between two ranks take: latency and bandwidth.

Messages go through the runtime's own transport, there and back; a reduction is one of two ranks.
As in training, every message is of memory that was just made, and comes after a pause: on a CPU
both together can double what a message takes (1 MB by gloo: 0.44 ms warm, 0.86 ms so).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.costs.profile_file import Link
from strategies.runtime.messages.device_transport import (
    DeviceTransport,
    NcclTransport,
    StagedTransport,
)
from strategies.runtime.messages.transport import GlooTransport, SharedTransport, Transport

_SIZES = (2**10, 2**14, 2**17, 2**20, 2**22)  # bytes
_REPETITIONS = 12
_FEW = 5
_WARM_UPS = 3
_PAUSE_S = 3e-3
_ROUNDS, _PRODUCTS = 10, 4


class Links(NamedTuple):
    """What was measured between two ranks.

    Attributes:
        messages: From stage to stage.
        reductions: A step of a ring.
        end_s: What a small message takes of a rank's processor that sends or receives it.
    """

    messages: Link
    reductions: Link
    end_s: float


def measure_links(
    first: int, second: int, *, backend: str, device: torch.device, quick: bool = False
) -> Links | None:
    """Between two global ranks, None on others; collective over all.

    ``quick``: by fewer messages, in a third of a second.
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
        transport = NcclTransport(lambda source, target: pairs[source < target], own, device)
    elif backend == "shared" and device.type == "cuda":
        transport = DeviceTransport(group, device, timeout_s=600.0)
    elif backend == "shared":
        transport = SharedTransport(group, timeout_s=600.0)
    elif backend == "staged":
        transport = StagedTransport(group, device)
    else:
        transport = GlooTransport(group)
    times = _FEW if quick else _REPETITIONS
    messages, end_s = _fitted(device, partial(_there_and_back, transport, own), times, trips=2)
    reductions, _ = _fitted(device, partial(dist.all_reduce, group=group), times, trips=1)
    transport.drain()
    dist.barrier(group)
    transport.close()
    for made in (group, *pairs):
        dist.destroy_process_group(made)
    # A ring of two moves the whole once, in two steps.
    return Links(messages, Link(reductions.latency_s / 2, reductions.bandwidth), end_s)


def measure_lockstep(
    first: int, second: int, *, backend: str, device: torch.device
) -> float | None:
    """What two ranks lose that wait for each other after every few products; collective over all.

    Neither is always as fast as the other: cores are shared, clocks change. Each wait costs what
    the slower one takes longer, and the next time that may be the other. Given as a share of the
    compute between two waits, on the two ranks; None on others.
    """
    members = sorted({first, second})
    group = dist.new_group(members, backend="nccl" if backend == "nccl" else "gloo")
    if dist.get_rank() not in members:
        return None
    left, right = (torch.ones(256, width, device=device) for width in (256, 1024))
    mark = torch.zeros(1024, device=device)

    def took(*, products: bool, waits: bool) -> float:
        dist.barrier(group)
        begun = time.perf_counter()
        for _ in range(_ROUNDS):
            for _ in range(_PRODUCTS if products else 0):
                left @ right
            if waits:
                dist.all_reduce(mark, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    losses = []
    for _ in range(_WARM_UPS + _REPETITIONS):
        alone, waiting = took(products=True, waits=False), took(products=False, waits=True)
        losses.append((took(products=True, waits=True) - waiting) / alone - 1.0)
    dist.destroy_process_group(group)
    return max(0.0, statistics.median(losses[_WARM_UPS:]))


def _fitted(
    device: torch.device, call: Callable[[Tensor], None], repetitions: int, *, trips: int
) -> tuple[Link, float]:
    """The link, and processor seconds of the smallest call, per trip."""
    times, busy = [], []
    for size in _SIZES:
        found = []
        for _ in range(_WARM_UPS + repetitions):
            data = torch.zeros(size // 4, device=device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            time.sleep(_PAUSE_S)
            begun, used = time.perf_counter(), time.process_time()
            call(data)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append((time.perf_counter() - begun) / trips)
            if size == _SIZES[0]:
                busy.append((time.process_time() - used) / trips)
        times.append(statistics.median(found[_WARM_UPS:]))
    return fit_link(_SIZES, times), statistics.median(busy[_WARM_UPS:])


def fit_link(sizes: Sequence[int], times: Sequence[float]) -> Link:
    """Latency and bandwidth whose predictions have the least relative errors, squared and summed.

    Relative, or the largest messages would decide alone; over all sizes (bytes, at least two
    different ones), as a message between the smallest and the largest often takes longer than the
    line through those two says.

    >>> found = fit_link((1000, 2000, 4000), (2e-3, 3e-3, 5e-3))
    >>> round(found.latency_s, 9), round(found.bandwidth)
    (0.001, 1000000)
    """
    # Minimise sum(((latency + slope * size) / time - 1)^2): two normal equations.
    ones = sum(1 / t**2 for t in times)
    lengths = sum(s / t**2 for s, t in zip(sizes, times, strict=True))
    squares = sum((s / t) ** 2 for s, t in zip(sizes, times, strict=True))
    right = sum(1 / t for t in times)
    right_lengths = sum(s / t for s, t in zip(sizes, times, strict=True))
    determinant = ones * squares - lengths**2
    latency = (right * squares - right_lengths * lengths) / determinant
    slope = (ones * right_lengths - lengths * right) / determinant
    return Link(max(0.0, latency), 1.0 / max(slope, 1e-15))


def _there_and_back(transport: Transport, own: int, data: Tensor) -> None:
    answer = torch.empty_like(data)
    if own == 0:
        sent = transport.send(data, 1, 0)
        transport.receive(answer, 1, 1).wait()
        sent.wait()
    else:
        transport.receive(answer, 0, 0).wait()
        transport.send(data, 0, 1).wait()
