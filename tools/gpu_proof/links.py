"""Messages between two processes of one card: NCCL, gloo through the host, CUDA IPC handles.

NCCL refuses two ranks of one host on one GPU. With a host's name of its own (``NCCL_HOSTID``) for
each rank it takes them for two machines and talks through sockets: slowly, and all the same code
runs as between GPUs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tools.gpu_proof.proof import Setting
from tools.gpu_proof.timing import Clock

_SIZES = (1 << 10, 1 << 17, 1 << 20, 1 << 24)
_QUICK = (1 << 10, 1 << 16)


def nccl_one(setting: Setting) -> dict[str, Any]:
    """What communicators of one rank cost in seconds and device memory."""
    clock = Clock(setting.device, quick=setting.quick)

    def used() -> int:
        free, total = torch.cuda.mem_get_info() if clock.gpu else (0, 0)
        return total - free

    x = torch.ones(1 << (10 if setting.quick else 22), device=clock.device)
    clock.wait()
    before, begun = used(), time.perf_counter()
    _join("nccl" if clock.gpu else "gloo", 0, 1, _free_port())
    dist.all_reduce(x)
    clock.wait()
    found: dict[str, Any] = {
        "first_s": time.perf_counter() - begun, "first_bytes": used() - before,
    }  # fmt: skip
    before, begun = used(), time.perf_counter()
    for _ in range(4):
        group = dist.new_group([0], backend="nccl" if clock.gpu else "gloo")
        dist.all_reduce(x, group=group)
    clock.wait()
    found["another_s"] = (time.perf_counter() - begun) / 4
    found["another_bytes"] = (used() - before) / 4
    for most in (1, 8) if clock.gpu else ():
        options: Any = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = most
        before = used()
        group = dist.new_group([0], backend="nccl", pg_options=options)
        dist.all_reduce(x, group=group)
        clock.wait()
        found[f"another_bytes_of_{most}_channels"] = used() - before
    return found


def nccl_two(setting: Setting) -> dict[str, Any]:
    """NCCL between two ranks that share the card."""
    return _pair("nccl", setting)


def nccl_refused(setting: Setting) -> dict[str, Any]:
    """What NCCL says to two ranks that share a card and a host's name; expected is a refusal."""
    found = _pair("refused", setting)
    said = str(found.pop("failed", ""))
    return {"refused": bool(said), "says": said[-600:]} | found


def staged(setting: Setting) -> dict[str, Any]:
    """Gloo through pinned host memory."""
    return _pair("staged", setting)


def ipc(setting: Setting) -> dict[str, Any]:
    """Device memory that both have mapped; an event says that it is filled."""
    return _pair("ipc", setting)


def _pair(kind: str, setting: Setting) -> dict[str, Any]:
    """What rank 0 of two has found. They are forked: nothing here has used the device yet."""
    note = setting.partial.with_name(f"{kind}.json")
    port, until = _free_port(), time.monotonic() + setting.seconds - 3
    own = {} if kind == "refused" else {"NCCL_HOSTID": "shared{rank}"}
    variables = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} | own
    forks = multiprocessing.get_context("fork")
    logs = [note.with_suffix(f".{rank}") for rank in (0, 1)]
    ranks = [
        forks.Process(
            target=_rank, args=(kind, rank, setting, port, note, variables, logs[rank]), daemon=True
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(max(1.0, until - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    if note.exists() and codes == [0, 0]:
        found: dict[str, Any] = json.loads(note.read_text())
        return found
    said = (
        ("did not end; " if code is None else "") + log.read_text(errors="replace")[-500:]
        for code, log in zip(codes, logs, strict=True)
    )
    return {"failed": "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said))}


def _rank(
    kind: str,
    rank: int,
    setting: Setting,
    port: int,
    note: Path,
    variables: Mapping[str, str],
    log: Path,
) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {name: value.format(rank=rank) for name, value in variables.items()}
    quick = setting.quick
    clock = Clock(setting.device, quick=quick)
    if clock.gpu:
        torch.cuda.set_device(clock.device)
    nccl = kind in ("nccl", "refused")
    _join("nccl" if nccl and clock.gpu else "gloo", rank, 2, port)
    sizes = _QUICK if quick else _SIZES
    found: dict[str, Any] = {}
    if nccl:
        begun = time.perf_counter()
        x = torch.full((1 << 20,), float(rank + 1), device=clock.device)
        dist.all_reduce(x)
        assert float(x[0]) == 3.0
        found["first_s"] = time.perf_counter() - begun
    ways = {"nccl": _by_nccl, "refused": _by_nccl, "staged": _by_gloo, "ipc": _by_ipc}[kind]
    way = ways(clock, rank, max(sizes))
    for size in sizes:
        found[f"message_{size}_s"] = _one_way(clock, rank, *way(size), 5 if nccl else 20)
        if nccl:
            t = torch.empty(size, dtype=torch.uint8, device=clock.device)
            found[f"all_reduce_{size}_s"] = clock.host(partial(dist.all_reduce, t), 5)["done_s"]
    dist.barrier()
    if rank == 0:
        note.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


Way = Callable[[int], tuple[Callable[[], object], Callable[[], object]]]


def _one_way(
    clock: Clock, rank: int, out: Callable[[], object], into: Callable[[], object], count: int
) -> float:
    """Seconds of a message one way: half of there and back."""
    turns = (out, into) if rank == 0 else (into, out)
    for turn in turns:
        turn()
    clock.wait()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        for turn in turns:
            turn()
    clock.wait()
    return (time.perf_counter() - begun) / count / 2


def _by_nccl(clock: Clock, rank: int, most: int) -> Way:
    def way(size: int) -> tuple[Callable[[], object], Callable[[], object]]:
        t = torch.empty(size, dtype=torch.uint8, device=clock.device)
        return (lambda: dist.send(t, 1 - rank)), (lambda: dist.recv(t, 1 - rank))

    return way


def _by_gloo(clock: Clock, rank: int, most: int) -> Way:
    def way(size: int) -> tuple[Callable[[], object], Callable[[], object]]:
        t = torch.empty(size, dtype=torch.uint8, device=clock.device)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=clock.gpu)

        def out() -> None:
            host.copy_(t, non_blocking=True)
            clock.wait()
            dist.send(host, 1 - rank)

        def into() -> None:
            dist.recv(host, 1 - rank)
            t.copy_(host, non_blocking=True)

        return out, into

    return way


def _by_ipc(clock: Clock, rank: int, most: int) -> Way:
    """Each writes into its own block; the other copies out of it."""
    import pickle
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")
    mine = torch.zeros(most, dtype=torch.uint8, device=clock.device)
    if clock.gpu:
        done: Any = torch.cuda.Event(interprocess=True)
        done.record()
    else:
        mine.share_memory_()
        done = None
    said: list[Any] = [None, None]
    handle = done.ipc_handle() if clock.gpu else None
    dist.all_gather_object(said, (bytes(ForkingPickler.dumps(mine)), handle))
    theirs = pickle.loads(said[1 - rank][0])
    there: Any = None
    if clock.gpu:
        there = torch.cuda.Event.from_ipc_handle(clock.device, said[1 - rank][1])
    word = torch.zeros(1)

    def way(size: int) -> tuple[Callable[[], object], Callable[[], object]]:
        t = torch.empty(size, dtype=torch.uint8, device=clock.device)

        def out() -> None:
            mine[:size].fill_(rank + 7)
            if clock.gpu:
                done.record()
            dist.send(word, 1 - rank)

        def into() -> None:
            dist.recv(word, 1 - rank)
            if clock.gpu:
                torch.cuda.current_stream().wait_event(there)
            t.copy_(theirs[:size])

        def checked() -> None:
            into()
            assert int(t[-1]) == 1 - rank + 7, "what is mapped is not what was written"

        checked_first = [checked]

        def first_checked() -> None:
            (checked_first.pop() if checked_first else into)()

        return out, first_checked

    return way


def _join(backend: str, rank: int, world: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
