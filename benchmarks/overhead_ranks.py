"""What every rank of the benchmark does: all engines on one task, in turn."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.overhead_emulation import Emulation
from benchmarks.overhead_engine import Engine, Task
from benchmarks.overhead_ours import Ours
from strategies.costs.profile_file import Link
from strategies.ir.kinds import MICROBATCH_KINDS, Kind
from strategies.profiling.link_times import fit_link
from strategies.runtime.messages.transport import SharedTransport, Transport
from strategies.runtime.step.recorder import StepRecord

# Imported where they are asked for.
ENGINES = {
    "ours": ("benchmarks.overhead_ours", "Ours"),
    "torch": ("benchmarks.overhead_torch", "Torch"),
    "torch_ours": ("benchmarks.overhead_torch", "TorchOurs"),
    "bare": ("benchmarks.overhead_bare", "Bare"),
    "autograd": ("benchmarks.overhead_bare", "Autograd"),
}
# Of the messages by which `busy_link` finds what one takes.
_SIZES = (2**14, 2**17, 2**20, 2**21)  # bytes
_MESSAGES = 15
_WARM_UPS = 3
_PAUSE_S = 10e-3  # as an instruction: what has been idle begins slowly


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


class Mark(NamedTuple):
    """One instruction of compute, on the clock of all ranks of this machine."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


class Steady(NamedTuple):
    """One rank's steps behind each other.

    Attributes:
        periods: Seconds from step to step.
        link: Seconds of a message while all ranks talk to their neighbours.
        marks: Of one step before those.
    """

    periods: list[float]
    link: float
    marks: list[Mark]


def run_steady(
    *,
    schedule: str,
    num_microbatches: int,
    emulation: Emulation,
    warmups: int,
    repetitions: int,
    clip: str,
) -> Steady:
    """Of this rank, which waits for no other at the end of a step.

    ``clip`` as in ``Ours``; of what has a flush, nothing.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    link, marks = busy_link(), []
    engine = Ours(Task(schedule, ranks, num_microbatches, rank, emulation), clip=clip)
    ended = []
    dist.barrier()
    for repetition in range(warmups + repetitions + 1):
        engine.step()
        if repetition >= warmups:
            ended.append(time.perf_counter())
        if repetition == warmups - 1:
            marks = _marks(engine.last_record(), rank)
    engine.close()
    dist.barrier()
    periods = [after - before for before, after in pairwise(ended)]
    return Steady(periods, link.latency_s + 4 * emulation.elements / link.bandwidth, marks)


def _marks(record: StepRecord, rank: int) -> list[Mark]:
    """A step's stamps, of which waiting for messages is no part.

    A rank hands on itself what it has made, so that belongs to what makes it.
    """
    found: list[Mark] = []
    for item, start, end in zip(record.program.ranks[rank], record.start, record.end, strict=True):
        if item.kind in MICROBATCH_KINDS and item.microbatch is not None:
            found.append(Mark(item.kind.value, item.stage, item.microbatch, start, end))
        elif item.kind is Kind.SEND and found:
            found[-1] = found[-1]._replace(end=end)
    return found


def durations(marks: Sequence[Mark]) -> dict[str, float]:
    """Medians of each kind."""
    times: dict[str, list[float]] = {}
    for mark in marks:
        times.setdefault(mark.kind, []).append(mark.end - mark.start)
    return {kind: statistics.median(spans) for kind, spans in times.items()}


class Between(NamedTuple):
    """Seconds that pass between two instructions of a rank.

    Attributes:
        messages: From the end of what makes one to the beginning of what waits for it.
        rest: Where nothing was waited for.
    """

    messages: list[float]
    rest: list[float]


def between(ranks: Sequence[Sequence[Mark]], link: float) -> Between:
    """Of all ranks; ``link`` is about what a message takes."""
    made = {
        (mark.kind == "F", mark.stage, mark.microbatch): (rank, mark.end)
        for rank, marks in enumerate(ranks)
        for mark in marks
        if mark.kind != "W"
    }
    found = Between([], [])
    for rank, marks in enumerate(ranks):
        for before, mark in pairwise(marks):
            forward = mark.kind == "F"
            source = (forward, mark.stage + (-1 if forward else 1), mark.microbatch)
            maker, end = made.get(source, (rank, 0.0))
            if mark.kind == "W" or maker == rank or end + 2 * link < before.end:
                found.rest.append(mark.start - before.end)
            elif end > before.end:
                found.messages.append(mark.start - end)
    return found


def _build(name: str, task: Task) -> Engine:
    module, attribute = ENGINES[name]
    engine: Engine = getattr(importlib.import_module(module), attribute)(task)
    return engine


def busy_link() -> Link:
    """What a message takes while every rank talks to both neighbours; the same on all ranks.

    Ranks of one machine end their instructions at about the same time, so their messages share its
    cores. Measured between two ranks while the others are silent, a message takes half as long.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)), backend="gloo")
    transport = SharedTransport(group, timeout_s=600.0)
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < size]
    times = []
    for length in _SIZES:
        taken = [_once(transport, neighbours, length) for _ in range(_MESSAGES)]
        own = torch.tensor(statistics.median(taken[_WARM_UPS:]), dtype=torch.float64)
        dist.all_reduce(own)
        times.append(float(own) / size)
    dist.barrier()  # No rank leaves before all have received everything.
    dist.destroy_process_group(group)
    return fit_link(_SIZES, times)


def _once(transport: Transport, neighbours: list[int], length: int) -> float:
    """Seconds until what all neighbours have sent is here."""
    leaving = torch.zeros(length // 4)
    dist.barrier()  # Of another group: in that of messages it may not end beside them.
    time.sleep(_PAUSE_S)
    begun = time.perf_counter()
    arriving = [
        transport.expect(leaving.shape, leaving.dtype, leaving.device, n, 0) for n in neighbours
    ]
    sent = [transport.send(leaving, n, 0) for n in neighbours]
    for arrival in arriving:
        arrival.wait()
    took = time.perf_counter() - begun
    for handle in sent:
        handle.wait()
    return took


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
