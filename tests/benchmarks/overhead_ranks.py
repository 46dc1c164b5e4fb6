"""What every rank of the benchmark does: all engines on one task, in turn."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch.distributed as dist

from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.runtime.step.recorder import StepRecord
from tests.benchmarks.busy_link import busy_link
from tests.benchmarks.overhead_emulation import Emulation
from tests.benchmarks.overhead_engine import Engine, Task
from tests.benchmarks.overhead_ours import Ours

# Imported where they are asked for.
ENGINES = {
    "ours": ("tests.benchmarks.overhead_ours", "Ours"),
    "torch": ("tests.benchmarks.overhead_torch", "Torch"),
    "torch_ours": ("tests.benchmarks.overhead_torch", "TorchOurs"),
    "bare": ("tests.benchmarks.overhead_bare", "Bare"),
    "autograd": ("tests.benchmarks.overhead_bare", "Autograd"),
}


@dataclass(frozen=True, slots=True)
class Spans:
    """One engine on one rank.

    Attributes:
        step_s: Duration of each repetition.
        busy_s: Emulated compute in it.
        order: The engine's own compute order as CSV; None for that of our schedule.
    """

    step_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    order: str | None


def run_task(
    *,
    schedule: str,
    num_microbatches: int,
    engines: tuple[str, ...],
    emulation: Emulation,
    warmups: int,
    repetitions: int,
) -> dict[str, Spans]:
    """All engines on one task, one step each in turn, so that noise hits them alike."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    emulations = {name: replace(emulation) for name in engines}
    built = {
        name: _build(name, Task(schedule, ranks, num_microbatches, rank, emulations[name]))
        for name in engines
    }
    step_s: dict[str, list[float]] = {name: [] for name in engines}
    busy_s: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(warmups + repetitions):
        for name, engine in built.items():
            emulations[name].busy_s = 0.0
            dist.barrier()
            started = time.perf_counter()
            engine.step()
            taken = time.perf_counter() - started
            if repetition >= warmups:
                step_s[name].append(taken)
                busy_s[name].append(emulations[name].busy_s)
    dist.barrier()
    found = {
        name: Spans(tuple(step_s[name]), tuple(busy_s[name]), engine.order())
        for name, engine in built.items()
    }
    for engine in built.values():
        engine.close()
    return found


def run_steady(
    *,
    schedule: str,
    num_microbatches: int,
    emulation: Emulation,
    warmups: int,
    repetitions: int,
    clip: str,
) -> tuple[list[float], dict[str, float]]:
    """Seconds from step to step of this rank, which waits for no other at their ends.

    ``clip`` as in ``Ours``; of what has a flush, nothing. With it seconds of this
    rank's kinds of compute, by their letters, in the first step; and of a ``message``.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    link = busy_link()
    found = {"message": link.latency_s + 4 * emulation.elements / link.bandwidth}
    engine = Ours(Task(schedule, ranks, num_microbatches, rank, emulation), clip=clip)
    ended = []
    dist.barrier()
    for repetition in range(warmups + repetitions + 1):
        engine.step()
        if repetition >= warmups:
            ended.append(time.perf_counter())
        if repetition == warmups - 1:
            found |= _durations(engine.last_record(), rank)
    engine.close()
    dist.barrier()
    return [after - before for before, after in pairwise(ended)], found


def _durations(record: StepRecord, rank: int) -> dict[str, float]:
    """Medians of a step's stamps, of which waiting for messages is no part."""
    times: dict[str, list[float]] = {}
    row = record.program.ranks[rank]
    for item, start, end in zip(row, record.start, record.end, strict=True):
        if item.kind in MICROBATCH_KINDS:
            times.setdefault(item.kind.value, []).append(end - start)
    return {kind: statistics.median(spans) for kind, spans in times.items()}


def _build(name: str, task: Task) -> Engine:
    module, attribute = ENGINES[name]
    engine: Engine = getattr(importlib.import_module(module), attribute)(task)
    return engine


def prepare(*, realtime: bool) -> bool:
    """Makes sleeps end on time.

    Args:
        realtime: Put all threads of this rank, the backend's too, before those of other programs.

    Returns:
        Whether the ranks have the priority that was asked for.
    """
    with suppress(OSError):
        # Linux lets a sleep last 50 us longer to save interrupts.
        Path("/proc/self/timerslack_ns").write_text("1")
    if realtime:
        try:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(10))
        except OSError:
            return False
    return True
