"""Rewrites ``launcher/commands/workspace.json`` with the package wandb-workspaces.

    pip install --no-deps 'wandb-workspaces==0.4.*' && python -m tests.launcher.dashboard_definition

The file is what the package would send (``View.spec``); pushing it needs neither the package nor
wandb (``launcher/commands/dashboard.py``). Panels get fixed ids: the same definition is the same
file.
"""

from __future__ import annotations

import json
from pathlib import Path

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws

FILE = Path(__file__).resolve().parents[2] / "launcher" / "commands" / "workspace.json"
_STEP = "trainer/global_step"

# Section -> panel title -> metrics over the steps; a name that ends in .* is a pattern.
SECTIONS: dict[str, dict[str, list[str]]] = {
    "training": {
        "loss": ["train_loss", "val_loss"],
        "gradient norm": ["grad_norm"],
        "learning rate": ["lr"],
        "steps left out": ["skipped_steps"],
    },
    "speed": {
        "step time (s)": ["step_time_s"],
        "tokens per second": ["tokens_per_s"],
        "MFU": ["mfu"],
    },
    "pipeline": {
        "bubble ratio": ["bubble_ratio"],
        "exposed gradient reduction (s)": ["exposed_grad_reduce_s"],
    },
    "memory": {
        "peak memory per rank (bytes)": ["peak_memory_bytes/.*"],
        "largest peak memory (bytes)": ["peak_memory_bytes_max"],
    },
}


def definition() -> str:
    """The view's specification as JSON."""
    sections = []
    for name, panels in SECTIONS.items():
        lines = [_line(title, metrics) for title, metrics in panels.items()]
        if name == "pipeline":
            lines += [wr.MediaBrowser(title="timeline", media_keys=["timeline", "timeline_image"])]
        sections.append(ws.Section(name=name, panels=lines, is_open=True))
    workspace = ws.Workspace(entity="e", project="p", name="foldpipe", sections=sections)
    spec = json.loads(workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    bank = spec["section"]["panelBankConfig"]["sections"]
    for number, panel in enumerate(panel for section in bank for panel in section["panels"]):
        panel["__id__"] = f"foldpipe{number:03d}"
    return json.dumps(spec, indent=1, sort_keys=True) + "\n"


def _line(title: str, metrics: list[str]) -> wr.LinePlot:
    if metrics[0].endswith(".*"):
        return wr.LinePlot(title=title, x=_STEP, metric_regex=metrics[0])
    return wr.LinePlot(title=title, x=_STEP, y=metrics)


if __name__ == "__main__":
    FILE.write_text(definition())
