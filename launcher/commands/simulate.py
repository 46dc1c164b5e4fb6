"""``mode=simulate``: the timeline and its figures, nothing started, torch not imported."""

from __future__ import annotations

from pathlib import Path

from launcher.config import LaunchConfig
from launcher.planning.plan_auto import planned
from launcher.report.ascii import draw
from launcher.report.html import Panel
from launcher.report.predicted import predict, run_mapping, write_pictures
from launcher.report.result import metrics_mapping, recompute_mapping, write_result
from launcher.report.summary import print_summary
from launcher.resolve import resolve
from launcher.terminal import say, terminal_width


def run(config: LaunchConfig, run_dir: Path) -> int:
    resolved = resolve(planned(config, run_dir))
    timeline, metrics = predict(resolved)
    panel = Panel("predicted", timeline, metrics)
    write_pictures(run_dir, [panel], resolved)
    result = run_mapping(resolved, "done") | metrics_mapping(metrics) | recompute_mapping(metrics)
    write_result(run_dir / "result.json", result)
    say(draw(timeline, width=terminal_width()))
    print_summary(result)
    say(f"files: {run_dir}")
    return 0
