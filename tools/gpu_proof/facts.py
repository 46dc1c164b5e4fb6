"""What the card is, what starting work and moving bytes costs on it, and what may be forked."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own habit

from tools.gpu_proof.proof import ROOT, Setting
from tools.gpu_proof.timing import Clock

_PACKAGES = (
    "hydra-core", "omegaconf", "wandb", "lightning", "transformers", "triton", "numpy", "scipy",
)  # fmt: skip


def ask_driver(names: str) -> str:
    """What nvidia-smi says of these; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    return ""


def card(setting: Setting) -> dict[str, Any]:
    """Versions, sizes, clocks, and what a context takes of the device's memory."""
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "mps": shutil.which("nvidia-cuda-mps-control"),
    }
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if setting.device != "cuda":
        return found
    others = ask_driver("utilization.gpu,memory.used")
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info(0)
    facts = torch.cuda.get_device_properties(0)
    nccl: Any = torch.cuda.nccl
    return found | {
        "name": facts.name,
        "uuid_is_known": bool(str(facts.uuid)),
        "multiprocessors": facts.multi_processor_count,
        "l2_bytes": facts.L2_cache_size,
        "total_bytes": total,
        "before": others,
        # Others' memory is in it, too: "before" tells how much that is.
        "context_bytes": total - free - torch.cuda.memory_reserved(),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": list(nccl.version()),
        "driver": ask_driver(
            "driver_version,power.limit,clocks.max.sm,clocks.max.mem,compute_mode"
        ),
    }


def costs(setting: Setting) -> dict[str, Any]:
    """Seconds of launches, events and copies; bytes of allocations, workspaces and optimizers."""
    clock = Clock(setting.device, quick=setting.quick)
    clock.warm(1.0)
    found: dict[str, Any] = {"clocks": clock.clocks()}
    for part in (_launches, _copies, _allocations, _optimizers):
        found[part.__name__.strip("_")] = part(clock)
        setting.keep(found)
    return found


def _launches(clock: Clock) -> dict[str, Any]:
    x = torch.ones(1, device=clock.device)
    w = torch.ones(64, 64, device=clock.device, requires_grad=True)
    found: dict[str, Any] = {
        "add_": clock.host(lambda: x.add_(1)),
        "item": clock.host(x.item),
        "linear_forward_backward": clock.host(lambda: F.linear(w, w).sum().backward(), 100),
    }
    if clock.gpu:
        found["new_event_and_record"] = clock.host(
            lambda: torch.cuda.Event(enable_timing=True).record()
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                x.add_(1)
        found["kernel_in_a_graph_s"] = clock.seconds(graph.replay) / 100
    return found


def _copies(clock: Clock) -> dict[str, Any]:
    size = 1 << (16 if clock.quick else 30)
    a, b = (torch.empty(size, dtype=torch.uint8, device=clock.device).random_() for _ in range(2))
    found: dict[str, Any] = {"copy_bytes_per_s": 2 * size / clock.seconds(lambda: b.copy_(a))}
    for part in (1 << 20, 1 << 24, 1 << 28) if clock.gpu else ():
        pinned = torch.empty(part, dtype=torch.uint8, pin_memory=True)
        pages = torch.empty(part, dtype=torch.uint8)
        here = torch.empty(part, dtype=torch.uint8, device=clock.device)
        found[f"host_{part}"] = {
            "to_host_s": clock.seconds(partial(pinned.copy_, here, non_blocking=True)),
            "from_host_s": clock.seconds(partial(here.copy_, pinned, non_blocking=True)),
            "from_pages_s": clock.seconds(partial(here.copy_, pages), most=5),
        }
    return found


def _allocations(clock: Clock) -> dict[str, Any]:
    if not clock.gpu:
        return {}
    cuda = torch.cuda
    a = clock.random(512, 512, grad=True)
    before = cuda.memory_allocated()
    out = a @ a
    main = cuda.memory_allocated() - before - out.nbytes
    before = cuda.memory_allocated()
    out.sum().backward()
    assert a.grad is not None
    return {
        "workspace_bytes": main,
        "workspace_bytes_of_backward": cuda.memory_allocated() - before - a.grad.nbytes,
    }


def _optimizers(clock: Clock) -> dict[str, Any]:
    """AdamW over 0.4 GB: seconds, bytes per second of the 28 that a weight has, temporaries."""
    found: dict[str, Any] = {}
    for how in ("foreach", "fused"):
        side = 64 if clock.quick else 4096
        weights = [
            torch.nn.Parameter(torch.randn(side, side, device=clock.device)) for _ in range(6)
        ]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW(weights, **{how: True})  # type: ignore[arg-type]
        size = sum(weight.nbytes for weight in weights)
        optimizer.step()
        clock.wait()
        before = 0
        if clock.gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        took = clock.seconds(optimizer.step, 0.1)
        found[how] = {"s": took, "bytes_per_s": 7 * size / took}
        if clock.gpu:
            temporary = torch.cuda.max_memory_allocated() - before
            found[how]["temporaries_over_weights"] = temporary / size
    many = [clock.random(256, 256, dtype=torch.float32) for _ in range(300)]
    found["scale_300_tensors_foreach"] = clock.host(lambda: torch._foreach_mul_(many, 1.0), 10)
    return found


_FORK = """
import os, sys, torch, lightning.pytorch
torch.cuda.device_count(); torch.cuda.is_available()
exec(sys.argv[1])
child = os.fork()
if not child:
    try:
        torch.zeros(1, device=sys.argv[2]).item(); os._exit(0)
    except RuntimeError:
        os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def fork(setting: Setting) -> dict[str, Any]:
    """Whether a process that has only imported torch and Lightning may fork ranks for the GPU.

    Expected are 0 (the child's kernel ran), and 1 where the parent has used the GPU itself.
    """
    found = {}
    cases = {"imports_only": "", "after_cuda": "torch.zeros(1, device=sys.argv[2])"}
    for name, first in list(cases.items())[: 1 if setting.quick else None]:
        command = [sys.executable, "-c", _FORK, first, setting.device]
        said = subprocess.run(command, capture_output=True, text=True, timeout=setting.seconds)
        found[name] = said.stdout.strip() or said.stderr[-300:]
    if found["imports_only"] != "0":
        return found | {"failed": f"a fork after imports cannot use the device: {found}"}
    return found


def doctor(setting: Setting) -> dict[str, Any]:
    """What ``python -m launcher doctor`` says of the machine."""
    said = subprocess.run(
        [sys.executable, "-m", "launcher", "doctor"],
        capture_output=True, text=True, timeout=setting.seconds, cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    found: dict[str, Any] = {"exit": said.returncode, "says": said.stdout.splitlines()}
    if said.returncode != 0:
        found["failed"] = (
            f"doctor ended with {said.returncode}: {said.stderr[-300:] or said.stdout}"
        )
    return found
