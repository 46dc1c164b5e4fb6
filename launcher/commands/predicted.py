"""What every mode knows before anything runs: the program, simulated, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.report.html import Panel, write_timeline_html
from launcher.report.result import versions
from launcher.report.schedule_files import write_schedule_files
from launcher.report.trace import write_trace
from launcher.resolve import Run
from strategies.metrics import Metrics, measure
from strategies.simulator.engine import simulate
from strategies.timeline import Timeline


def predict(run: Run) -> tuple[Timeline, Metrics]:
    """The training step as the run's costs have it."""
    timeline = simulate(run.programs.train, run.costs)
    cap = run.plan.recompute.max_full_activations
    return timeline, measure(timeline, run.costs, cap=cap)


def run_mapping(run: Run, status: str) -> dict[str, object]:
    """The keys of result.json that every mode has."""
    config = run.config
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
    }


def write_pictures(run_dir: Path, panels: Sequence[Panel], run: Run) -> None:
    """schedule.txt, schedule.csv, timeline.html and trace.json."""
    first = panels[0]
    assert first.metrics is not None
    write_schedule_files(run_dir, first.timeline, first.metrics)
    config = run.config
    degrees = f"pp={config.pp} dp={run.dp}" + (f" tp={config.tp}" if config.tp > 1 else "")
    title = f"{config.schedule.name} {degrees} num_microbatches={run.num_microbatches}"
    write_timeline_html(run_dir / "timeline.html", panels, title=title)
    write_trace(run_dir / "trace.json", [panel.timeline for panel in panels])
