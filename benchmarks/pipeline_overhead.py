"""What engines add to a schedule: step time over the critical path, with compute that only sleeps.

    python -m benchmarks.pipeline_overhead
    python -m benchmarks.pipeline_overhead --schedules all --engines ours bare --json out.json
    python -m benchmarks.pipeline_overhead --steady --schedules 1f1b zb_v pipedream_2bw

Ranks on this machine, those of this runtime with shared memory, all others by gloo; F takes 10 ms
per rank and microbatch, I and W 10 ms each (a virtual stage its share), activations and their
gradients 1 MB. Engines: this runtime, the same schedule of torch.distributed.pipelining on the same
modules, torch's pipeline runtime on our own program with its messages (``torch_ours``), and as
floors the least that can walk our program's lists, without (``bare``) and with autograd
(``autograd``). They take turns step by step
in the same processes. A cell is the median over the repetitions of the slowest rank's step, between
barriers, over the simulated makespan of that engine's own order with free messages.

With ``--steady`` this runtime alone runs one step behind the other without a barrier between them:
a cell is the median period over the simulated one. What has no flush has no bubble there; with
``--clip early`` nor has clipping by norm, with ``--clip waits`` ranks agree at each update.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import overhead_ranks
from benchmarks.overhead_emulation import Emulation
from benchmarks.overhead_paths import critical_path, steady_period
from benchmarks.overhead_torch import runs_ours
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError
from strategies.schedules import SCHEDULES, find_schedule
from tests.ranks.pool import Ranks

SHARED = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zb_v")
ENGINES = tuple(overhead_ranks.ENGINES)
WARMUPS = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine on one schedule and number of microbatches.

    Attributes:
        schedule: Our name.
        num_microbatches: M.
        engine: ``ours``, ``torch``, ``torch_ours``, ``bare`` or ``autograd``.
        step_ms: Median step.
        path_ms: Its order's critical path.
        ratio: The one over the other.
        busy: A rank's emulated compute in a median step over what was asked for, less 1; of the
            rank that is furthest off.
        steps_ms: All repetitions.
        predicted_ms: A period with messages, and with instructions, as long as they were measured
            right before; None for steps between barriers.
    """

    schedule: str
    num_microbatches: int
    engine: str
    step_ms: float
    path_ms: float
    ratio: float
    busy: float
    steps_ms: tuple[float, ...]
    predicted_ms: float | None = None


def measure(
    ranks: Ranks,
    *,
    schedules: Sequence[str] = SHARED,
    microbatches: Sequence[int] = (8, 16),
    engines: Sequence[str] = ENGINES,
    repetitions: int = 5,
    forward_ms: float = 10.0,
    elements: int = 2**18,
    realtime: bool = False,
) -> list[Cell]:
    """Runs everything; where torch has no such schedule, it is left out."""
    if not all(ranks.run(overhead_ranks.prepare, realtime=realtime)):
        raise PermissionError("--realtime: this user may not set SCHED_FIFO. Leave it out.")
    cells = []
    for schedule in schedules:
        for count in microbatches:
            shape = find_schedule(schedule).resolve(
                pp=ranks.world_size, num_microbatches=count, stages_per_rank=None, group=None
            )
            share = forward_ms / 1e3 / find_schedule(schedule).place(shape).stages_per_microbatch
            chosen = tuple(e for e in engines if e != "torch" or schedule in SHARED)
            if not runs_ours(schedule, pp=ranks.world_size, num_microbatches=count):
                chosen = tuple(e for e in chosen if e != "torch_ours")
            found = ranks.run(
                overhead_ranks.run_task,
                schedule=schedule,
                num_microbatches=count,
                engines=chosen,
                emulation=Emulation(share, share, share, elements),
                warmups=WARMUPS,
                repetitions=repetitions,
            )
            cells += [
                _cell(schedule, count, engine, [rank[engine] for rank in found], forward_ms)
                for engine in chosen
            ]
    return cells


def measure_steady(
    ranks: Ranks,
    *,
    schedules: Sequence[str],
    microbatches: Sequence[int],
    repetitions: int,
    forward_ms: float,
    elements: int = 2**18,
    realtime: bool = False,
    clip: str = "",
) -> list[Cell]:
    """Periods of our runtime, steps behind each other."""
    if not all(ranks.run(overhead_ranks.prepare, realtime=realtime)):
        raise PermissionError("--realtime: this user may not set SCHED_FIFO. Leave it out.")
    cells = []
    for schedule in schedules:
        for count in microbatches:
            shape = find_schedule(schedule).resolve(
                pp=ranks.world_size, num_microbatches=count, stages_per_rank=None, group=None
            )
            share = forward_ms / 1e3 / find_schedule(schedule).place(shape).stages_per_microbatch
            found = ranks.run(
                overhead_ranks.run_steady,
                schedule=schedule,
                num_microbatches=count,
                emulation=Emulation(share, share, share, elements),
                warmups=WARMUPS,
                repetitions=repetitions,
                clip=clip,
            )
            steps = [
                1e3 * max(each) for each in zip(*(rank.periods for rank in found), strict=True)
            ]
            median = statistics.median(steps)
            stages = find_schedule(schedule).place(shape).stages_per_microbatch
            path, predicted = (
                steady_period(schedule, ranks=ranks.world_size, num_microbatches=count, costs=costs)
                for costs in (
                    UniformCosts(forward_ms, 2 * forward_ms),
                    _measured(found, stages),
                )
            )
            ratio = median / path
            cells.append(
                Cell(schedule, count, "ours", median, path, ratio, 0.0, tuple(steps), predicted)
            )
    return cells


def _measured(found: Sequence[overhead_ranks.Steady], stages: float) -> UniformCosts:
    """Milliseconds per rank and microbatch, of ``stages`` on each; means over the ranks.

    All of one step before: a message takes what those have taken that a rank has waited for, and an
    instruction besides what passes until the next one begins where nothing was waited for.
    """
    each = [overhead_ranks.durations(rank.marks) for rank in found]
    link = found[0].link
    gaps = overhead_ranks.between([rank.marks for rank in found], link)
    more = statistics.median(gaps.rest) if gaps.rest else 0.0

    def mean(kind: str) -> float:
        took = [rank[kind] for rank in each if kind in rank]
        return 1e3 * stages * (statistics.fmean(took) + more)

    took = statistics.median(gaps.messages) - more if gaps.messages else link
    message = 1e3 * max(0.0, took)  # On a busy machine what passes in between may be longer.
    forward = mean("F")
    if any("I" in took for took in each):
        inputs, weights = mean("I"), mean("W")
        return UniformCosts(forward, inputs + weights, inputs, p2p=message)
    return UniformCosts(forward, mean("B"), p2p=message)


def _cell(
    schedule: str,
    num_microbatches: int,
    engine: str,
    spans: Sequence[overhead_ranks.Spans],
    forward_ms: float,
) -> Cell:
    """Brings one engine's ranks together."""
    steps = [1e3 * max(taken) for taken in zip(*(span.step_s for span in spans), strict=True)]
    path = critical_path(
        schedule,
        ranks=len(spans),
        num_microbatches=num_microbatches,
        forward=forward_ms,
        order=spans[0].order,
    )
    nominal = 3 * forward_ms * num_microbatches / 1e3
    busy = max((statistics.median(span.busy_s) / nominal - 1 for span in spans), key=abs)
    median = statistics.median(steps)
    return Cell(schedule, num_microbatches, engine, median, path, median / path, busy, tuple(steps))


def table(cells: Sequence[Cell], num_microbatches: int) -> str:
    """Markdown: a row per schedule; ratio, and the median step in ms."""
    mine = [cell for cell in cells if cell.num_microbatches == num_microbatches]
    engines = [name for name in ENGINES if any(cell.engine == name for cell in mine)]
    lines = [
        f"| m = {num_microbatches} | {' | '.join(engines)} |",
        "|---" * (len(engines) + 1) + "|",
    ]
    for schedule in dict.fromkeys(cell.schedule for cell in mine):
        row = {cell.engine: cell for cell in mine if cell.schedule == schedule}
        texts = [_text(row[name]) if name in row else "-" for name in engines]
        lines.append(f"| {schedule} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _text(cell: Cell) -> str:
    text = f"{cell.ratio:.2f} ({cell.step_ms:.0f} ms)"
    if cell.predicted_ms is None:
        return text
    off = cell.step_ms / cell.predicted_ms - 1
    return f"{text}; with what its parts take {cell.predicted_ms:.0f} ms predicted ({off:+.1%})"


def machine() -> str:
    """This machine, and what runs on it."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} x {model}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, load {load:.1f} at start"
    )


def _chosen(arguments: argparse.Namespace) -> list[str]:
    """The schedules asked for; ``all`` are those that what is measured makes sense for."""
    steady: bool = arguments.steady
    fitting = [
        name for name in SCHEDULES
        if find_schedule(name).synchronous or (steady and name != "pipedream")
    ]  # fmt: skip
    if arguments.schedules == ["all"]:
        return fitting
    for name in arguments.schedules:
        if name in SCHEDULES and name not in fitting:
            rule = "has one microbatch per update" if steady else "has no flush (see --steady)"
            _parser().error(f"{name} {rule}; take one of {', '.join(fitting)}")
    return list(arguments.schedules)


def main() -> None:
    arguments = _parser().parse_args()
    schedules = _chosen(arguments)
    about = machine()
    ranks = Ranks(arguments.ranks)
    try:
        if arguments.steady:
            cells = measure_steady(
                ranks,
                schedules=schedules,
                microbatches=arguments.microbatches,
                repetitions=arguments.repetitions,
                forward_ms=arguments.forward_ms,
                realtime=arguments.realtime,
                clip=arguments.clip,
            )
        else:
            cells = measure(
                ranks,
                schedules=schedules,
                microbatches=arguments.microbatches,
                engines=arguments.engines,
                repetitions=arguments.repetitions,
                forward_ms=arguments.forward_ms,
                realtime=arguments.realtime,
            )
    except (PlanError, PermissionError) as error:
        sys.exit(f"pipeline_overhead: {error}")
    finally:
        ranks.close()
    command = " ".join(["python -m benchmarks.pipeline_overhead", *sys.argv[1:]])
    out = [table(cells, count) for count in arguments.microbatches]
    used = dict.fromkeys(cell.engine for cell in cells)
    busy = {e: max((cell.busy for cell in cells if cell.engine == e), key=abs) for e in used}
    deviations = ", ".join(f"{engine} {value:+.1%}" for engine, value in busy.items())
    what = "Period over the simulated one" if arguments.steady else "Step over own critical path"
    out.append(
        f"{what} (median of {arguments.repetitions} steps after {WARMUPS}); "
        f"p={arguments.ranks}, F=I=W={arguments.forward_ms:g} ms, 1 MB "
        "(ours in shared memory, all others by gloo).\n"
        f"Emulated compute against what was asked for, on the worst rank: {deviations}.\n"
        f"{about}\n{command}\n"
    )
    sys.stdout.write("\n".join(out))
    if arguments.json is not None:
        content = {"machine": about, "command": command, "cells": [asdict(c) for c in cells]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_overhead")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=list(SHARED),
        metavar="NAME",
        help=f"ours by name, or `all` that fit; default: what torch has, too ({' '.join(SHARED)})",
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16], metavar="M")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--ranks", type=int, default=4, metavar="P")
    parser.add_argument("--forward-ms", type=float, default=10.0, metavar="MS")
    parser.add_argument(
        "--realtime", action="store_true", help="SCHED_FIFO for all ranks (needs the right to)"
    )
    parser.add_argument(
        "--steady", action="store_true", help="periods of ours, steps behind each other"
    )
    parser.add_argument(
        "--clip",
        default="",
        choices=("waits", "early"),
        help="with --steady, clip by norm where there is no flush, agreed at the update or before",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures, machine-readable")
    return parser


if __name__ == "__main__":
    main()
