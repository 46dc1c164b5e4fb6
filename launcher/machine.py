"""What decides how fast a rank computes here, found out without torch."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from strategies.costs.profile import Machine


def this_machine(*, ranks: int, gpu: bool) -> Machine:
    """The machine as the ranks of a run find it.

    Args:
        ranks: Processes of the run, which share the cores.
        gpu: Whether they run on GPUs.
    """
    return Machine(
        processor=_processor(),
        accelerator=_accelerator() if gpu else None,
        cores=os.cpu_count() or 1,
        threads=rank_threads(ranks),
        torch=version("torch"),
    )


def rank_threads(ranks: int) -> int:
    """Threads of one of some ranks: what the user has set, or its share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, (os.cpu_count() or 1) // ranks)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _accelerator() -> str:
    """The first GPU's name as its driver gives it."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                return value.strip()
    return "GPU"
