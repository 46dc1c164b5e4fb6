"""The real part of ``prediction``: a small transformer on 2 ranks, costs from ``mode=profile``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.ranks import rank_pool
from benchmarks.trained import OPTIMIZER, Trained, profile, train
from launcher.config import LaunchConfig, from_dict
from launcher.planning.profile_check import write_refined
from launcher.resolve import resolve
from strategies.analysis.memory import peak_saved
from strategies.simulator.engine import simulate

RANKS = 2
SIZES = "1,4"  # that are measured; what lies between them is interpolated
SHAPE = {
    "layers": 8, "hidden": 192, "heads": 4, "kv_heads": 4, "ffn": 512, "vocab": 256,
    "sequence": 128,
}  # fmt: skip
Case = tuple[str, str, int, int]  # schedule, recompute, microbatches, microbatch size
# Every kind of instruction is in one of them; none of them is a case.
CALIBRATING: tuple[Case, ...] = (("1f1b", "full", 4, 2), ("zb_v", "none", 4, 2))
QUICK: tuple[Case, ...] = (("1f1b", "none", 4, 1), ("1f1b", "full", 4, 1), ("zb_v", "none", 4, 1))
_UNSPLIT = ("gpipe", "1f1b", "interleaved_1f1b")
ALL: tuple[Case, ...] = tuple(
    (schedule, recompute, count, size)
    for count, size in ((4, 1), (8, 1), (4, 2), (4, 4))
    for schedule in (*_UNSPLIT, "foldx_fifo", "zb_h1", "zb_v")
    for recompute in (("none", "full", "mario") if schedule in _UNSPLIT else ("none",))
    if (schedule, recompute, count, size) not in CALIBRATING
)


def measure(
    *, steps: int, quick: bool, rounds: int, shape: Mapping[str, int], iterations: int
) -> Iterator[tuple[Any, ...]]:
    """Per case the name, and step time, compute, bytes per rank, each predicted and measured.

    A round measures the layers, corrects the profile by the calibrating runs, as ``costs.refine``
    does, and then runs all cases. How fast a machine is changes by the minute, and what disturbs it
    only makes it slower: of each figure the least of all rounds counts, predicted or measured.
    """
    cases = QUICK if quick else ALL
    seen: dict[Case, list[tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...]]]] = {}
    with tempfile.TemporaryDirectory() as folder, rank_pool(RANKS) as ranks:
        for number in range(1, rounds + 1):
            file = Path(folder) / f"profile{number}.json"
            profile(
                Path(folder), shape, ranks=RANKS, sizes=SIZES, iterations=iterations,
                target=f"profile.file={file}",
            )  # fmt: skip
            for case in CALIBRATING:
                config = configuration(case, file, shape)
                timeline = train(ranks, config, steps, timeline=True)[0].timeline
                assert timeline is not None
                write_refined(file, resolve(config).costs, timeline)
            for case in cases:
                config = configuration(case, file, shape)
                found = train(ranks, config, steps)
                seen.setdefault(case, []).append(_compared(config, found))
            sys.stderr.write(f"round {number} of {rounds} is done\n")
    for (schedule, recompute, count, size), results in seen.items():
        figures = zip(*(seconds for seconds, *_ in results), strict=True)
        _, predicted_bytes, measured_bytes = results[-1]
        name = f"{schedule}, {recompute}, {count} x {size}"
        yield name, *map(min, figures), predicted_bytes, measured_bytes


def _compared(
    config: LaunchConfig, found: list[Trained]
) -> tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...]]:
    """Step time and compute of all ranks, and bytes per rank, each predicted and measured."""
    run = resolve(config)
    program = run.programs.train
    memory = run.costs.table(program).memory
    assert memory is not None
    timeline = simulate(program, run.costs)
    seconds = (
        timeline.period,  # No rank waits at the flush: what counts is the time from step to step.
        max(rank.period_s for rank in found),
        sum(map(timeline.busy, range(RANKS))),
        sum(rank.busy_s for rank in found),
    )
    return seconds, peak_saved(program, memory), tuple(rank.saved_bytes for rank in found)


def configuration(case: Case, file: Path, shape: Mapping[str, int]) -> LaunchConfig:
    """What a user types for one case."""
    schedule, recompute, count, size = case
    virtual = 2 if schedule in ("interleaved_1f1b", "foldx_fifo") else None
    return from_dict(
        {
            "mode": "validate",
            "pp": RANKS,
            "num_microbatches": count,
            "schedule": {"name": schedule, "stages_per_rank": virtual},
            "recompute": {"name": recompute},
            "costs": {"name": "profiled", "file": str(file)},
            "model": dict(shape),
            "data": {"microbatch_size": size},
            "optimizer": dict(OPTIMIZER),
        }
    )
