"""What every mode knows before anything runs: the program, simulated, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.report.html import Panel, write_timeline_html
from launcher.report.memory_bars import memory_mapping
from launcher.report.result import versions
from launcher.report.schedule_files import write_schedule_files
from launcher.report.trace import write_trace
from launcher.resolve import Run
from strategies.memory_model import RankMemory, peak_memory
from strategies.metrics import Metrics, measure
from strategies.simulator.engine import simulate
from strategies.timeline import Timeline


def predict(run: Run) -> tuple[Timeline, Metrics]:
    """The training step as the run's costs have it."""
    timeline = simulate(run.programs.train, run.costs, cores=cores_per_replica(run))
    cap = run.plan.recompute.max_full_activations
    return timeline, measure(timeline, run.costs, cap=cap)


def rank_memory(run: Run) -> tuple[RankMemory, ...] | None:
    """What each pipeline rank holds at its worst moment; None where the costs know no bytes."""
    return peak_memory(run.programs.train, run.costs.table(run.programs.train))


def cores_per_replica(run: Run) -> float | None:
    """``hardware.cores`` as the ranks of one pipeline share them with all others."""
    cores = run.config.hardware.cores
    return None if cores is None else cores / (run.dp * run.config.tp)


def run_mapping(run: Run, status: str) -> dict[str, object]:
    """The keys of result.json that every mode has."""
    config = run.config
    memory = rank_memory(run)
    return {
        "status": status,
        "mode": config.mode,
        "schedule": config.schedule.name,
        "pp": config.pp,
        "dp": run.dp,
        "tp": config.tp,
        "sequence_parallel": config.sequence_parallel,
        "stages_per_rank": run.plan.stages_per_rank,
        "num_microbatches": run.num_microbatches,
        "recompute": config.recompute.name,
        "overlap": config.overlap.name,
        "seed": config.seed,
        "versions": versions(),
        "group": run.group,
        "group_choice": None if run.programs.choice is None else run.programs.choice.reason,
        "split_backward": config.schedule.split_backward,
        "memory_breakdown": None if memory is None else memory_mapping(memory),
    }


def write_pictures(run_dir: Path, panels: Sequence[Panel], run: Run) -> None:
    """schedule.txt, schedule.csv, timeline.html and trace.json."""
    first = panels[0]
    assert first.metrics is not None
    write_schedule_files(run_dir, first.timeline, first.metrics)
    config = run.config
    degrees = f"pp={config.pp} dp={run.dp}" + (f" tp={config.tp}" if config.tp > 1 else "")
    title = f"{config.schedule.name} {degrees} num_microbatches={run.num_microbatches}"
    limit = config.hardware.memory_gb * 1e9
    drawn = [
        panel
        if panel.metrics is None
        else replace(panel, memory=rank_memory(run), memory_limit=limit)
        for panel in panels
    ]
    write_timeline_html(run_dir / "timeline.html", drawn, title=title)
    write_trace(run_dir / "trace.json", [panel.timeline for panel in panels])
