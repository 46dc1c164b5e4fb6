"""What every rank of ``fold_on_links`` does: measures the links, then runs all in turns."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engine import in_turns, ready
from benchmarks.fold_on_links_engines import Groups, LinkEngine, build
from benchmarks.fold_on_links_scenario import Link, Scenario
from strategies.runtime.messages.mesh import Coordinates

_PROBES = 12
_SMALL, _MIDDLE, _LARGE = 1024, 2**18, 2**21  # bytes
_LEAD_S = 0.05


@contextmanager
def reductions_on(interface: str, where: Coordinates) -> Iterator[None]:
    """Groups made in this block that replicas of one rank form use that interface.

    gloo reads the interface's name where a group is made. All others stay where they are.
    """
    made = dist.new_group
    usual = os.environ["GLOO_SOCKET_IFNAME"]
    replicas = [where.replicas((rank,)) for rank in range(where.pp)]

    def new_group(ranks: list[int], *args: Any, **options: Any) -> Any:
        chosen = interface if tuple(ranks) in replicas else usual
        os.environ["GLOO_SOCKET_IFNAME"] = chosen
        try:
            return made(ranks, *args, **options)
        finally:
            os.environ["GLOO_SOCKET_IFNAME"] = usual

    dist.new_group = new_group  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group = made


def measure_link(where: Coordinates, groups: Groups) -> Link:
    """Messages there and back between the first two ranks of every pipeline; equal on all ranks.

    Latency is that of a small message; bandwidth is what a larger one takes longer.
    """
    own: tuple[float, ...] | None = None
    if where.pp_rank < 2:
        own = tuple(_one_way(where, groups, size) for size in (_SMALL, _MIDDLE, _LARGE))
    everybody: list[Any] = [None] * where.world_size
    dist.all_gather_object(everybody, own)
    known = [entry for entry in everybody if entry is not None]
    small, middle, large = (statistics.median(values) for values in zip(*known, strict=True))
    return Link((_LARGE - _MIDDLE) / (large - middle), small)


def _one_way(where: Coordinates, groups: Groups, size: int) -> float:
    data = torch.zeros(size, dtype=torch.uint8)
    peer = 1 - where.pp_rank
    group = groups.pipeline

    def send() -> None:
        dist.send(data, group=group, group_dst=peer)

    def receive() -> None:
        dist.recv(data, group=group, group_src=peer)

    taken = []
    for _ in range(2 + _PROBES):
        started = time.perf_counter()
        for call in (send, receive) if where.pp_rank == 0 else (receive, send):
            call()
        taken.append((time.perf_counter() - started) / 2)
    # Rank 1 begins its round when the message is there, and waits for the next one.
    return statistics.median(taken[2:])


def measure_reduction(scenario: Scenario, groups: Groups) -> float:
    """Seconds that one bucket's all-reduce takes with nothing beside it: to look at, not an input.

    The slowest rank's median.
    """
    bucket = torch.zeros(int(scenario.bucket_mb * 2**20) // 4)
    taken = []
    for _ in range(2 + _PROBES):
        dist.barrier(group=groups.replicas)
        started = time.perf_counter()
        dist.all_reduce(bucket, group=groups.replicas)
        taken.append(time.perf_counter() - started)
    slowest = torch.tensor(statistics.median(taken[2:]), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def run_step(engine: LinkEngine, interfaces: int, *, reduce: bool) -> dict[str, Any]:
    """One step that all ranks begin at the same time; the machine has one clock."""
    gc.collect()
    dist.barrier()
    before = _sent_bytes(interfaces)
    agreed = torch.tensor(time.perf_counter() + _LEAD_S, dtype=torch.float64)
    dist.broadcast(agreed, 0)
    begun = float(agreed)
    left = begun - time.perf_counter()
    if left > 0:
        time.sleep(left)
    engine.emulation.busy_s = 0.0
    engine.reduces = reduce
    engine.step()
    ended = time.perf_counter()
    # What has been handed to the interface is counted; another rank may still wait for the rest.
    dist.barrier()
    after = _sent_bytes(interfaces)
    return {
        "begun": begun,
        "ended": ended,
        "late": max(0.0, -left),
        "busy": engine.emulation.busy_s,
        "sent": [new - old for new, old in zip(after, before, strict=True)],
        "outlasting": engine.outlasting_s() if reduce else None,
    }


def _sent_bytes(interfaces: int) -> list[int]:
    """Bytes that left by eth0, eth1, ... so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    parts = (line.partition(":") for line in lines[2:])
    sent = {name.strip(): int(rest.split()[8]) for name, _, rest in parts}
    return [sent[f"eth{index}"] for index in range(interfaces)]


def run_rank(rank: int, *, scenario: Scenario, warmups: int, repetitions: int) -> dict[str, Any]:
    """One rank, from its start to its end; rank 0 returns what all have found."""
    where = Coordinates.of(rank, pp=scenario.pp, dp=scenario.dp)
    interfaces = scenario.interfaces

    def once(name: str) -> dict[str, dict[str, Any]]:
        return {
            kind: run_step(engines[name], interfaces, reduce=kind == "whole")
            for kind in ("whole", "bare")
        }

    with reductions_on(f"eth{interfaces - 1}", where):
        groups = Groups(where)
        link = measure_link(where, groups)
        dist.barrier()
        reduction_s = measure_reduction(scenario, groups)
        engines = {c.name: build(c, scenario, link, where, groups) for c in scenario.contenders}
        with ready(*engines.values()):
            gc.disable()
            found = in_turns(engines, once, warmups=warmups, repetitions=repetitions)
            gc.enable()
            steps = [
                {kind: [pair[kind] for pair in pairs] for kind in ("whole", "bare")}
                for pairs in found.values()
            ]
            everybody: list[Any] = [None] * where.world_size
            dist.all_gather_object(everybody, steps)
    return {"link": link, "reduction_s": reduction_s, "ranks": everybody}
