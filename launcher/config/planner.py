"""Keys of the planner: what it plans for, and how thoroughly it looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.config.key import key


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """``planner.*``: what ``mode=plan`` and ``plan=auto`` choose for."""

    num_gpus: int | None = key(
        None,
        "tp * pp * dp; null = the GPUs of this machine, or its CPU cores where it has none.",
        low=1,
        high=65536,
        example=64,
    )
    global_batch_size: int | None = key(
        None,
        "Sequences per optimizer step; null = data.global_batch_size, or 128 where that is null.",
        low=1,
        high=10_000_000,
        example=128,
    )
    memory_gb: float | None = key(
        None,
        "Memory that a rank may use, in GB (1e9 bytes); null = hardware.memory_gb.",
        above=0,
        example=36.0,
    )
    level: Literal["O2", "O3"] = key(
        "O2",
        "O2: common schedules and microbatch sizes, recomputation where memory demands it; O3: all "
        "schedules, sizes and groups. Both simulate until a bound excludes the rest.",
    )
    partition: Literal["dp", "ilp"] = key(
        "dp",
        "Who cuts the model into stages: dp = dynamic programming over the chain of units, ilp = "
        "an integer program over their graph (needs scipy).",
    )
    balance_ratio: float = key(
        1.08,
        "ilp: the slowest stage may take that many times an equal share.",
        low=1,
        high=100,
    )
    top_k: int = key(5, "Plans that are listed.", low=1, high=100)
    maximize: Literal["throughput", "sequence_length", "model_size"] = key(
        "throughput",
        "With pp, dp, tp and schedule pinned: the fastest recompute policy and microbatch size, "
        "or the longest model.sequence, or the most model.layers that fit, and at what speed.",
    )
    explain: tuple[str, ...] = key(
        (), "Show the best plan of one layout in detail.", example=["tp=4", "pp=8"]
    )


# ----------------------------------------------------------------------------------------- profile
#
# Keys of ``mode=profile``: what is measured, and where it is written.


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """``mode=profile``: measures layers and links for ``costs=profiled``."""

    file: str | None = key(
        None,
        "Where the profile goes; null = profile.json in the run's folder.",
        example="profile.json",
    )
    microbatch_sizes: tuple[int, ...] = key(
        (), "Microbatch sizes to measure; [] = data.microbatch_size.", low=1, example=[1, 2, 4]
    )
    hardware: str | None = key(
        None,
        "Also writes the figures of this machine there, as an option of hardware= for plans; the "
        "folder above it is a --config-dir.",
        example="my_conf/hardware/cpu_gloo.yaml",
    )
    iterations: int = key(
        10, "Training steps per figure; fewer where they take long.", low=3, high=25
    )
