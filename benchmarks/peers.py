"""Engines side by side on a real small model: step time and CPU time over training without one.

    python -m benchmarks.peers
    python -m benchmarks.peers --ranks 4 --microbatches 16 --json out.json

Gloo ranks on this machine train a GPT of 7 million parameters (8 blocks, 256 wide, two sequences of
128 tokens per microbatch). torch.distributed.pipelining is always there; megatron-core, DeepSpeed
and ColossalAI take part where they are installed (`pip install --no-deps`, beside torch 2.13).

All take turns step by step in the same processes, and with them one process that trains the same
model by itself while the others wait (``plain``). First each engine's weights after two steps are
compared with plain training's: who computes something else has no figures. Wall is the slowest
rank's step, between barriers; CPU is that of all ranks together. A cell is the median over the
repetitions, over the median of plain; behind it the quartiles. ``bare`` is no engine: it walks our
list with isend, irecv and autograd, and does nothing else. ``ideal`` is the wall that the schedule
would have if every layer took as long as in plain and nothing else took any time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.engine import in_turns, ready, timed
from benchmarks.peers_engines import ENGINES, PEERS, installed
from benchmarks.peers_model import Share, Size
from benchmarks.ranks import own_core, rank_pool
from benchmarks.table import Table, quartiles

TOLERANCE = 1e-5  # of weights in 32 bits, which two steps have moved by thousands of that


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine on one schedule; times in seconds, one per repetition.

    Attributes:
        engine: ``plain``, or as in ``PEERS``.
        schedule: By our name; of plain that of the others which it took turns with.
        wall_s: Of the slowest rank.
        cpu_s: Of all ranks together, and all their threads.
        difference: Largest one of a weight from plain's after two steps.
    """

    engine: str
    schedule: str
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    difference: float


def run_rank(
    *, schedule: str, engines: Sequence[str], size: Size, num_microbatches: int, repetitions: int
) -> list[Cell]:
    """What every rank does: plain training's cell, then those of the engines, all in turns."""
    names = ("plain", *engines)
    shares = {
        name: Share(schedule, size, num_microbatches, alone=name == "plain") for name in names
    }
    built = {name: ENGINES[name](share) for name, share in shares.items()}

    def once(name: str) -> tuple[float, float]:
        return (_alone if name == "plain" else timed)(built[name].step)

    with own_core(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's code
        with ready(*built.values()):
            for _ in range(2):
                for engine in built.values():
                    engine.step()
            apart = {name: _difference(name, shares) for name in engines}
            times = in_turns(built, once, warmups=0, repetitions=repetitions)
    cells = []
    for name in names:
        wall_s, cpu_s = zip(*times[name], strict=True)
        cells.append(Cell(name, schedule, wall_s, cpu_s, apart.get(name, 0.0)))
    return cells


def _difference(name: str, shares: dict[str, Share]) -> float:
    """Over all ranks, which must have each layer once."""
    wanted, own = shares["plain"].weights(), shares[name].weights()
    apart = torch.tensor(max(float((own[i] - wanted[i]).abs().max()) for i in own))
    count = torch.tensor(len(own))
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    dist.all_reduce(count)
    assert int(count) == len(wanted), f"{name}: {int(count)} of {len(wanted)} layers"
    return float(apart)


def _alone(step: Callable[[], None]) -> tuple[float, float]:
    """Rank 0's seconds while the others wait."""
    wall = cpu = 0.0
    dist.barrier()
    if dist.get_rank() == 0:
        used, began = time.process_time(), time.perf_counter()
        step()
        wall, cpu = time.perf_counter() - began, time.process_time() - used
    dist.barrier()
    return wall, cpu


def table(cells: Sequence[Cell], *, ranks: int, num_microbatches: int) -> str:
    """The table, and what the machine was like."""
    shown = Table("schedule", "engine", "wall over plain", "CPU over plain", "ideal wall")
    plain = cells[0]
    for cell in cells:
        if cell.engine == "plain":
            plain = cell
            continue
        if not cell.difference < TOLERANCE:
            shown.add(
                cell.schedule, cell.engine, f"weights differ by {cell.difference:.1e}", "", ""
            )
            continue
        chunks = 1 if cell.schedule == "1f1b" else 2
        ideal = (num_microbatches + (ranks - 1) / chunks) / (num_microbatches * ranks)
        wall, cpu = _over(cell.wall_s, plain.wall_s), _over(cell.cpu_s, plain.cpu_s)
        shown.add(cell.schedule, cell.engine, wall, cpu, f"{ideal:.3f}")
    plains = [cell for cell in cells if cell.engine == "plain"]
    wall_s = [took for cell in plains for took in cell.wall_s]
    typical = statistics.median(wall_s)
    used = statistics.median(took for cell in plains for took in cell.cpu_s)
    low, high = quartiles([took / typical for took in wall_s])
    return (
        f"{shown}\n\n"
        f"plain: {typical * 1e3:.0f} ms per step, quartiles {low:.3f}-{high:.3f} of it, wall over "
        f"CPU {typical / used:.2f} (1 on a machine that does nothing else); "
        f"{len(plain.wall_s)} repetitions, {ranks} ranks, {num_microbatches} microbatches\n"
    )


def _over(took: Sequence[float], plain: Sequence[float]) -> str:
    unit = statistics.median(plain)
    ratios = [value / unit for value in took]
    low, high = quartiles(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--schedules", nargs="+", default=list(PEERS["foldpipe"][1]))
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--hidden", type=int, default=Size().hidden)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    there = [engine for engine in given.engines if installed(engine)]
    for engine in given.engines:
        if engine not in there:
            sys.stderr.write(f"{engine} is not installed and takes no part\n")
    cells: list[Cell] = []
    with rank_pool(given.ranks) as ranks:
        for schedule in given.schedules:
            cells += ranks.run(
                run_rank,
                schedule=schedule,
                engines=[engine for engine in there if schedule in PEERS[engine][1]],
                size=Size(hidden=given.hidden),
                num_microbatches=given.microbatches,
                repetitions=given.repetitions,
            )[0]
    sys.stdout.write(table(cells, ranks=given.ranks, num_microbatches=given.microbatches))
    if given.json is not None:
        said = {"torch": torch.__version__, "cells": [asdict(cell) for cell in cells]}
        given.json.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
