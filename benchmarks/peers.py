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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.peers_engines import PEERS, installed
from benchmarks.peers_model import Size
from benchmarks.peers_ranks import Cell, run_rank
from tests.ranks.pool import Ranks

TOLERANCE = 1e-5  # of weights in 32 bits, which two steps have moved by thousands of that


def measure(
    ranks: Ranks,
    *,
    engines: Sequence[str],
    schedules: Sequence[str],
    num_microbatches: int,
    repetitions: int,
    size: Size,
) -> list[Cell]:
    """Per schedule plain training's cell, then those of the engines that have it."""
    cells: list[Cell] = []
    for schedule in schedules:
        found = ranks.run(
            run_rank, schedule=schedule, engines=[e for e in engines if schedule in PEERS[e][1]],
            size=size, num_microbatches=num_microbatches, repetitions=repetitions
        )  # fmt: skip
        cells += found[0]
    return cells


def table(cells: Sequence[Cell], *, ranks: int, num_microbatches: int) -> str:
    """Rows of Markdown, and what the machine was like."""
    lines = [
        "| schedule | engine | wall over plain | CPU over plain | ideal wall |",
        "|---|---|---|---|---|",
    ]
    plain = cells[0]
    for cell in cells:
        if cell.engine == "plain":
            plain = cell
            continue
        name = f"| {cell.schedule} | {cell.engine} "
        if not cell.difference < TOLERANCE:
            lines.append(f"{name}| weights differ by {cell.difference:.1e} | | |")
            continue
        chunks = 1 if cell.schedule == "1f1b" else 2
        ideal = (num_microbatches + (ranks - 1) / chunks) / (num_microbatches * ranks)
        wall, cpu = _over(cell.wall_s, plain.wall_s), _over(cell.cpu_s, plain.cpu_s)
        lines.append(f"{name}| {wall} | {cpu} | {ideal:.3f} |")
    plains = [cell for cell in cells if cell.engine == "plain"]
    wall_s = [took for cell in plains for took in cell.wall_s]
    typical = statistics.median(wall_s)
    used = statistics.median(took for cell in plains for took in cell.cpu_s)
    low, high = _quartiles([took / typical for took in wall_s])
    lines += [
        "",
        f"plain: {typical * 1e3:.0f} ms per step, quartiles {low:.3f}-{high:.3f} of it, wall over "
        f"CPU {typical / used:.2f} (1 on a machine that does nothing else); "
        f"{len(plain.wall_s)} repetitions, {ranks} ranks, {num_microbatches} microbatches",
    ]
    return "\n".join(lines)


def _over(took: Sequence[float], plain: Sequence[float]) -> str:
    unit = statistics.median(plain)
    ratios = [value / unit for value in took]
    low, high = _quartiles(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f}-{high:.3f})"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


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
    ranks = Ranks(given.ranks)
    try:
        cells = measure(
            ranks,
            engines=there,
            schedules=given.schedules,
            num_microbatches=given.microbatches,
            repetitions=given.repetitions,
            size=Size(hidden=given.hidden),
        )
    finally:
        ranks.close()
    shown = table(cells, ranks=given.ranks, num_microbatches=given.microbatches)
    sys.stdout.write(f"{shown}\n")
    if given.json is not None:
        said = {"torch": torch.__version__, "cells": [asdict(cell) for cell in cells]}
        given.json.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
