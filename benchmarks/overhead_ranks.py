"""What every rank of ``pipeline_overhead`` does: engines in turns, or steps behind each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch.distributed as dist

from benchmarks.emulation import Emulation, Task
from benchmarks.engine import Engine, in_turns, ready, steady, timed
from benchmarks.list_walk import Bare, sleeping_autograd
from benchmarks.ranks import busy_link
from benchmarks.runtime import SleepingOurs
from benchmarks.torch_pipelining import SleepingTorch, TorchOurs, TorchPipeline
from strategies.ir.kinds import MICROBATCH_KINDS, Kind
from strategies.runtime.step.recorder import StepRecord

ENGINES: dict[str, Callable[[Task], Engine]] = {
    "ours": SleepingOurs,
    "torch": SleepingTorch,
    "torch_ours": TorchOurs,
    "bare": Bare,
    "autograd": sleeping_autograd,
}


@dataclass(frozen=True, slots=True)
class Spans:
    """One engine on one rank.

    Attributes:
        step_s: Duration of each repetition, of the slowest rank.
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
    engines: Sequence[str],
    emulation: Emulation,
    warmups: int,
    repetitions: int,
) -> dict[str, Spans]:
    """All engines on one task, a step each in turn."""
    tasks = {name: Task(schedule, num_microbatches, replace(emulation)) for name in engines}
    built = {name: ENGINES[name](task) for name, task in tasks.items()}

    def once(name: str) -> tuple[float, float]:
        tasks[name].emulation.busy_s = 0.0
        took, _ = timed(built[name].step)
        return took, tasks[name].emulation.busy_s

    with ready(*built.values()):
        found = in_turns(built, once, warmups=warmups, repetitions=repetitions)
    spans = {}
    for name, engine in built.items():
        steps, busy = zip(*found[name], strict=True)
        order = engine.order if isinstance(engine, TorchPipeline) else None
        spans[name] = Spans(steps, busy, order)
    return spans


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
    clip: Literal["", "waits", "early"],
) -> Steady:
    """Of this rank, which waits for no other at the end of a step."""
    link = busy_link()
    engine = SleepingOurs(Task(schedule, num_microbatches, emulation), clip=clip)
    marks: list[Mark] = []

    def after(step: int) -> None:
        if step == warmups - 1:
            marks.extend(_marks(engine.last_record, dist.get_rank()))

    with ready(engine):
        ended = steady(engine, warmups=warmups + 1, steps=repetitions, after=after)
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
