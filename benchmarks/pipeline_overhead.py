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
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.emulation import Emulation
from benchmarks.overhead_paths import critical_path, measured_costs, steady_period
from benchmarks.overhead_ranks import ENGINES, Spans, run_steady, run_task
from benchmarks.ranks import rank_pool
from benchmarks.table import Table, command, furthest, machine
from benchmarks.torch_pipelining import SCHEDULES as SHARED
from benchmarks.torch_pipelining import runs_ours
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError
from strategies.plan import Plan
from strategies.schedules import SCHEDULES, find_schedule
from tests.ranks.pool import Ranks

WARMUPS = 2
ELEMENTS = 2**18


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


@dataclass(frozen=True, slots=True)
class Setting:
    """One schedule and number of microbatches; F in ms per rank and microbatch."""

    schedule: str
    num_microbatches: int
    ranks: int
    forward_ms: float
    repetitions: int

    @property
    def stages(self) -> float:
        """Of a rank, that a microbatch crosses."""
        found = find_schedule(self.schedule)
        shape = found.resolve(Plan(found.name, self.ranks, self.num_microbatches))
        return found.place(shape).stages_per_microbatch

    @property
    def options(self) -> dict[str, Any]:
        """What a rank is asked for."""
        share = self.forward_ms / 1e3 / self.stages
        return {
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "emulation": Emulation(share, share, share, ELEMENTS),
            "warmups": WARMUPS,
            "repetitions": self.repetitions,
        }


def measure(ranks: Ranks, setting: Setting, engines: Sequence[str]) -> list[Cell]:
    """All engines; what torch has no such schedule for, or cannot run, is left out."""
    schedule, count = setting.schedule, setting.num_microbatches
    theirs = schedule in SHARED
    loaded = runs_ours(schedule, pp=setting.ranks, num_microbatches=count)
    chosen = [
        e for e in engines if (e != "torch" or theirs) and (e != "torch_ours" or loaded)
    ]  # fmt: skip
    found = ranks.run(run_task, engines=chosen, **setting.options)
    return [_cell(setting, engine, [rank[engine] for rank in found]) for engine in chosen]


def measure_steady(
    ranks: Ranks, setting: Setting, clip: Literal["", "waits", "early"]
) -> list[Cell]:
    """The period of our runtime; clipping only where there is no flush."""
    schedule, count = setting.schedule, setting.num_microbatches
    clip = "" if find_schedule(schedule).synchronous else clip
    found = ranks.run(run_steady, clip=clip, **setting.options)
    steps = [1e3 * max(each) for each in zip(*(rank.periods for rank in found), strict=True)]
    median = statistics.median(steps)
    uniform = UniformCosts(setting.forward_ms, 2 * setting.forward_ms)
    path, predicted = (
        steady_period(schedule, ranks=setting.ranks, num_microbatches=count, costs=costs)
        for costs in (uniform, measured_costs(found, setting.stages))
    )
    ratio = median / path
    return [Cell(schedule, count, "ours", median, path, ratio, 0.0, tuple(steps), predicted)]


def _cell(setting: Setting, engine: str, spans: Sequence[Spans]) -> Cell:
    """Brings one engine's ranks together."""
    steps = tuple(1e3 * took for took in spans[0].step_s)
    path = critical_path(
        setting.schedule,
        ranks=setting.ranks,
        num_microbatches=setting.num_microbatches,
        forward=setting.forward_ms,
        order=spans[0].order,
    )
    nominal = 3 * setting.forward_ms * setting.num_microbatches / 1e3
    busy = furthest(statistics.median(span.busy_s) / nominal - 1 for span in spans)
    median = statistics.median(steps)
    return Cell(
        setting.schedule, setting.num_microbatches, engine, median, path, median / path, busy, steps
    )


def table(cells: Sequence[Cell], num_microbatches: int) -> str:
    """A row per schedule; ratio, and the median step in ms."""
    mine = [cell for cell in cells if cell.num_microbatches == num_microbatches]
    engines = [name for name in ENGINES if any(cell.engine == name for cell in mine)]
    shown = Table(f"m = {num_microbatches}", *engines)
    for schedule in dict.fromkeys(cell.schedule for cell in mine):
        row = {cell.engine: cell for cell in mine if cell.schedule == schedule}
        shown.add(schedule, *(_text(row[name]) if name in row else "-" for name in engines))
    return f"{shown}\n"


def _text(cell: Cell) -> str:
    text = f"{cell.ratio:.2f} ({cell.step_ms:.0f} ms)"
    if cell.predicted_ms is None:
        return text
    off = cell.step_ms / cell.predicted_ms - 1
    return f"{text}; with what its parts take {cell.predicted_ms:.0f} ms predicted ({off:+.1%})"


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
    given = _parser().parse_args()
    schedules = _chosen(given)
    about, words = machine(), command("pipeline_overhead")
    cells: list[Cell] = []
    try:
        with rank_pool(given.ranks, realtime=given.realtime) as ranks:
            for schedule in schedules:
                for count in given.microbatches:
                    setting = Setting(
                        schedule, count, given.ranks, given.forward_ms, given.repetitions
                    )
                    cells += (
                        measure_steady(ranks, setting, given.clip)
                        if given.steady
                        else measure(ranks, setting, given.engines)
                    )
    except PlanError as error:
        sys.exit(f"pipeline_overhead: {error}")
    used = dict.fromkeys(cell.engine for cell in cells)
    busy = {e: furthest(cell.busy for cell in cells if cell.engine == e) for e in used}
    deviations = ", ".join(f"{engine} {value:+.1%}" for engine, value in busy.items())
    what = "Period over the simulated one" if given.steady else "Step over own critical path"
    out = [table(cells, count) for count in given.microbatches]
    out.append(
        f"{what} (median of {given.repetitions} steps after {WARMUPS}); "
        f"p={given.ranks}, F=I=W={given.forward_ms:g} ms, 1 MB "
        "(ours in shared memory, all others by gloo).\n"
        f"Emulated compute against what was asked for, on the worst rank: {deviations}.\n"
        f"{about}\n{words}\n"
    )
    sys.stdout.write("\n".join(out))
    if given.json is not None:
        content = {"machine": about, "command": words, "cells": [asdict(c) for c in cells]}
        given.json.write_text(json.dumps(content, indent=1) + "\n")


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
