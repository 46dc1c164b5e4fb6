"""What every rank of ``peers`` does: all engines on one model, in turn."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.peers_engines import CLASSES
from benchmarks.peers_floors import Peer
from benchmarks.peers_model import Size


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine on one schedule; times in seconds, one per repetition.

    Attributes:
        engine: ``plain``, or as in ``PEERS``.
        schedule: By our name; of plain that of the others which it took turns with.
        wall_s: Of the slowest rank.
        cpu_s: Of all ranks together, and all their threads.
        difference: Largest one of a weight from plain's after two steps.
    """

    engine: str
    schedule: str
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    difference: float = 0.0


def run_rank(
    *,
    schedule: str,
    engines: Sequence[str],
    size: Size,
    num_microbatches: int,
    repetitions: int,
) -> list[Cell]:
    """What every rank does, on a core of its own if there are enough of them.

    All return the same, but for plain's times, which are rank 0's.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= dist.get_world_size():
        os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's code
            return _run(schedule, engines, size, num_microbatches, repetitions)
    finally:
        os.sched_setaffinity(0, cores)


def _run(
    schedule: str, engines: Sequence[str], size: Size, num_microbatches: int, repetitions: int
) -> list[Cell]:
    plain, *built = (
        CLASSES[name](schedule, size, num_microbatches) for name in ("plain", *engines)
    )
    for _ in range(2):
        for peer in (plain, *built):
            peer.step()
    differences = [0.0, *(_difference(peer, plain) for peer in built)]
    times: list[list[tuple[float, float]]] = [[] for _ in (plain, *built)]
    turns = list(enumerate((plain, *built)))
    order = random.Random(0)
    for _ in range(repetitions):
        order.shuffle(turns)  # Nobody always comes behind the same one.
        for place, peer in turns:
            times[place].append(_timed(peer.step, alone=peer is plain))
    for peer in built:
        peer.close()
    dist.barrier()
    return [
        Cell(name, schedule, tuple(w for w, _ in spans), tuple(c for _, c in spans), difference)
        for name, spans, difference in zip(("plain", *engines), times, differences, strict=True)
    ]


def _difference(peer: Peer, plain: Peer) -> float:
    """Over all ranks, which must have each layer once."""
    wanted, own = plain.weights(), peer.weights()
    apart = torch.tensor(max(float((own[i] - wanted[i]).abs().max()) for i in own))
    count = torch.tensor(len(own))
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    dist.all_reduce(count)
    assert int(count) == len(wanted), f"{type(peer).__name__}: {int(count)} of {len(wanted)} layers"
    return float(apart)


def _timed(step: Callable[[], None], *, alone: bool) -> tuple[float, float]:
    dist.barrier()
    if alone and dist.get_rank():
        dist.barrier()
        return 0.0, 0.0
    cpu, began = time.process_time(), time.perf_counter()
    step()
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    if alone:
        dist.barrier()
        return wall, used
    slowest, together = torch.tensor(wall), torch.tensor(used)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(together)
    return float(slowest), float(together)
