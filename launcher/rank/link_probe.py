"""One of two ranks of ``doctor``: what torch is, what its devices do, how fast ranks talk.

``python -m launcher.rank.link_probe RANK WORLD PORT`` prints one line of JSON on rank 0.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_SIZE, _GPU_SIZE = 768, 8192
_SMALL, _LARGE = 1, 16 << 20  # floats
_REPEATS = 20
_WAIT = timedelta(seconds=60)


def main(rank: int, world: int, port: int) -> None:
    """Measures; both ranks take part in what needs two."""
    said = _own() if rank == 0 else {}
    links = [_link("gloo", rank, world, port, torch.device("cpu"))]
    if torch.cuda.device_count() >= world and dist.is_nccl_available():
        links.append(_link("nccl", rank, world, port + 1, torch.device("cuda", rank)))
    if rank == 0:
        sys.stdout.write(json.dumps({**said, "links": links}) + "\n")
        sys.stdout.flush()


def _own() -> dict[str, Any]:
    cuda = torch.version.cuda or torch.version.hip
    build = f"{torch.__version__}, " + (f"CUDA {cuda}" if cuda else "CPU only")
    return {
        "build": f"{build}, gloo {'yes' if dist.is_gloo_available() else 'no'}, NCCL "
        f"{'yes' if _has_nccl() else 'no'}",
        "nccl": _has_nccl(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_flops": product_flops(torch.device("cpu"), torch.float32),
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())],
    }


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _gpu(number: int) -> dict[str, Any]:
    device = torch.device("cuda", number)
    kind = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "free": free,
        "total": total,
        "flops": product_flops(device, kind),
        "format": "bf16" if kind == torch.bfloat16 else "fp16",
    }


def product_flops(device: torch.device, kind: torch.dtype) -> float:
    """FLOP/s of a large matrix product, the quickest of several."""
    size = _GPU_SIZE if device.type == "cuda" else _SIZE
    # A GPU multiplies ones or zeros with less power, so faster, than what training multiplies.
    left = torch.randn(size, size, device=device, dtype=kind)

    def multiply() -> None:
        torch.mm(left, left)

    return 2 * size**3 / _quickest(multiply, device)


def _quickest(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS // 2):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _link(backend: str, rank: int, world: int, port: int, device: torch.device) -> dict[str, Any]:
    """Messages from each rank to the next, one way, as activations go."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(
                device
            )  # Where torch's collectives work that are given no tensor.
        store = TCPStore("127.0.0.1", port, world, rank == 0, timeout=_WAIT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_WAIT)
        try:
            latency = _one_way(rank, torch.zeros(_SMALL, device=device))
            large = _one_way(rank, torch.zeros(_LARGE, device=device))
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return {"backend": backend, "error": str(error).splitlines()[0]}
    rate = 4 * _LARGE / large
    return {"backend": backend, "ranks": world, "latency_s": latency, "bytes_per_s": rate}


def _one_way(rank: int, tensor: torch.Tensor) -> float:
    """Half of a round trip, the quickest of several."""

    def there_and_back() -> None:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    dist.barrier()
    return _quickest(there_and_back, tensor.device) / 2


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
