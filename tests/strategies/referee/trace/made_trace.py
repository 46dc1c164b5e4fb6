"""Kineto traces as runs of a known timeline would leave them, for tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Literal

from strategies.analysis.timeline import Timeline
from strategies.compiler import compile_plan
from strategies.costs.uniform import UniformCosts
from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.plan import Plan
from strategies.simulator.engine import simulate

Style = Literal["marks", "kernels", "operators"]


def known(
    name: str, pp: int, count: int, costs: UniformCosts, chunks: int | None = None
) -> Timeline:
    plan = Plan(name, pp, count, chunks, costs=costs)
    return simulate(compile_plan(plan).train, costs)


def events(
    timeline: Timeline, rank: int, *, style: Style = "marks", offset: float = 0.0, steps: int = 1
) -> list[dict[str, object]]:
    """What one rank writes; a unit of the timeline is 10 ms.

    Args:
        timeline: Which.
        rank: Whose.
        style: What stands around the computations: torch's marks with operators or with kernels
            in them, or nothing but operators and messages.
        offset: Seconds that the rank's clock is ahead.
        steps: How often the timeline ran.
    """
    found: list[dict[str, object]] = []
    unit = 1e4

    def add(name: str, cat: str, start: float, end: float, **args: object) -> None:
        at = start * unit + offset * 1e6
        found.append({"ph": "X", "name": name, "cat": cat, "ts": at, "dur": (end - start) * unit,
                      "pid": 1, "tid": 1, "args": args})  # fmt: skip

    number = 0
    for step in range(steps):
        base = step * (timeline.makespan + 1)
        before = base
        own = sorted(
            (e for e in timeline.events(rank) if e.instruction.kind in MICROBATCH_KINDS),
            key=lambda event: event.start,
        )
        for event in own:
            number += 1
            start, end = base + event.start, base + event.end
            forward = event.instruction.kind.value == "F"
            last = timeline.program.placement.num_stages - 1
            stage = event.instruction.stage
            receives = stage > 0 if forward else stage < last
            sends = stage < last if forward else stage > 0
            entered = min(before, start)  # It waits for its input inside the mark.
            if style in ("marks", "kernels"):
                add(f"PP:{event.instruction}", "user_annotation", entered, end)
            if receives:
                add("c10d::recv_", "cpu_op", entered, entered + 0.001)
            if style == "kernels":
                launched = entered + 0.0005
                add("cudaLaunchKernel", "cuda_runtime", launched, launched, correlation=number)
                add("gemm", "kernel", start, end, correlation=number)
                add("ncclDevKernel_SendRecv", "kernel", entered, end, correlation=-number)
            else:
                name = "aten::linear" if forward else "autograd::engine::evaluate_function: Mm"
                add(name, "cpu_op", start + 1e-6, end - 1e-6)
            if sends:
                add("c10d::send", "cpu_op", end, end + 0.001)
                if style in ("marks", "kernels"):
                    letter = "F" if forward else "B"
                    text = f"PP:{stage}SEND_{letter}{event.instruction.microbatch}"
                    add(text, "user_annotation", end, end + 0.001)
            before = end + 0.001
    return found


def write(
    folder: Path,
    timeline: Timeline,
    *,
    style: Style = "marks",
    offsets: dict[int, float] | None = None,
    steps: int = 1,
    zipped: bool = False,
) -> list[Path]:
    """One file per rank."""
    paths = []
    for rank in range(len(timeline.program.ranks)):
        offset = (offsets or {}).get(rank, 0.0)
        tree = {
            "distributedInfo": {"rank": rank, "world_size": len(timeline.program.ranks)},
            "host_name": f"host{rank}" if offsets else "here",
            "traceEvents": events(timeline, rank, style=style, offset=offset, steps=steps),
        }
        data = json.dumps(tree).encode()
        path = folder / f"rank{rank}.json{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(data) if zipped else data)
        paths.append(path)
    return paths
