"""What every rank does: measures the links, then runs all contenders in turn.

    python -m benchmarks.fold_on_links_rank MASTER:PORT SCENARIO.pickle RESULT.json HOST...

Started by ``fold_on_links``. It forks a rank per host, so that what ranks import is imported once,
and ends them all as soon as one has failed. Rank 0 writes the result.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from benchmarks.fold_on_links_engines import Engine, Groups, build
from benchmarks.fold_on_links_scenario import Assignment, Link, Scenario
from benchmarks.ranks import prepare
from strategies.runtime.messages.mesh import Coordinates

_DEADLINE = timedelta(seconds=120)
_PROBES = 12
_SMALL, _MIDDLE, _LARGE = 1024, 2**18, 2**21  # bytes
_LEAD_S = 0.05
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


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


def run_step(engine: Engine, interfaces: int, *, reduce: bool) -> dict[str, Any]:
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
    engine.step(reduce=reduce)
    ended = time.perf_counter()
    # What has been handed to the interface is counted; another rank may still wait for the rest.
    dist.barrier()
    after = _sent_bytes(interfaces)
    found: dict[str, Any] = {
        "begun": begun,
        "ended": ended,
        "late": max(0.0, -left),
        "busy": engine.emulation.busy_s,
        "sent": [new - old for new, old in zip(after, before, strict=True)],
    }
    if reduce:
        found["outlasting"] = engine.outlasting_s()
    return found


def _sent_bytes(interfaces: int) -> list[int]:
    """Bytes that left by eth0, eth1, ... so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    sent = {name.strip(): int(rest.split()[8]) for name, _, rest in map(_split, lines[2:])}
    return [sent[f"eth{index}"] for index in range(interfaces)]


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def run_all(
    assignment: Assignment, engines: list[Engine], interfaces: int
) -> list[dict[str, list[Any]]]:
    """Every contender's steps with and without reductions, one each in turn."""
    steps: list[dict[str, list[Any]]] = [{"whole": [], "bare": []} for _ in engines]
    gc.disable()
    for repetition in range(assignment.warmups + assignment.repetitions):
        for offset in range(len(engines)):
            # Another one is the first of each turn, so that nobody always follows the same one.
            place = (offset + repetition) % len(engines)
            for reduce, kept in ((True, "whole"), (False, "bare")):
                found = run_step(engines[place], interfaces, reduce=reduce)
                if repetition >= assignment.warmups:
                    steps[place][kept].append(found)
    gc.enable()
    return steps


def main() -> None:
    """A rank per host, each forked onto its own, and the first failure of any."""
    master, task, result, *hosts = sys.argv[1:]
    # Whatever ends the parent ends these, or namespaces would live on with them.
    _die_with_parent()
    gc.collect()
    gc.freeze()  # A collection before every step would else walk all that was imported.
    ranks: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, host, log_of(Path(task), rank), master, Path(task), Path(result))
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"rank {rank} failed:\n{log_of(Path(task), rank).read_text(errors='replace')}")


def log_of(task: Path, rank: int) -> Path:
    return task.with_name(f"rank{rank}.log")


def _be_rank(rank: int, host: str, log: Path, master: str, task: Path, result: Path) -> NoReturn:
    code = 1
    try:
        _die_with_parent()
        with log.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        with Path("/run/netns", host).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {host}")
        with suppress(PermissionError):  # Before other programs, where that is allowed.
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        run_rank(rank, master, task, result)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_rank(rank: int, master: str, task: Path, result: Path) -> None:
    """One rank, from its start to its end."""
    assignment: Assignment = pickle.loads(task.read_bytes())
    scenario = assignment.scenario
    torch.set_num_threads(1)
    prepare(realtime=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    where = Coordinates.of(rank, pp=scenario.pp, dp=scenario.dp)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}",
        rank=rank,
        world_size=where.world_size,
        timeout=_DEADLINE,
    )
    with reductions_on(f"eth{scenario.interfaces - 1}", where):
        groups = Groups(where)
        link = measure_link(where, groups)
        dist.barrier()
        reduction_s = measure_reduction(scenario, groups)
        engines = [
            build(contender, scenario, link, where, groups) for contender in scenario.contenders
        ]
    steps = run_all(assignment, engines, scenario.interfaces)
    everybody: list[Any] = [None] * where.world_size if rank == 0 else []
    dist.gather_object(steps, everybody if rank == 0 else None)
    if rank == 0:
        content = {"link": asdict(link), "reduction_s": reduction_s, "ranks": everybody}
        result.write_text(json.dumps(content))
    dist.barrier()
    for engine in engines:
        engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
