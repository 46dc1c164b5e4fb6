"""The parts of a job script that docs/guides/slurm.md explains: from the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from launcher.config import check, from_dict
from launcher.processes.nodes import plan_nodes
from launcher.processes.slurm_script import job_script
from tools.docs.pages import ROOT

_RUN, _HOME = Path("/home/me/outputs/fold"), Path("/home/me")
_ASKED = {
    "pp": 8, "dp": 4, "schedule": {"name": "1f1b"}, "experiment_name": "fold",
    "cluster": {
        "name": "slurm", "nodes": 4, "gpus_per_node": 8, "partition": "gpu", "time": "24:00:00",
        "account": "team", "cpus_per_task": 8, "mem": "0", "srun": ["--cpu-bind=cores"],
        "setup": ["module load cuda", "export NCCL_DEBUG=WARN"],
    },
}  # fmt: skip
# Name of a part -> the line that it begins with.
_BEGINS = {
    "asks": "#!/bin/bash",
    "place": "run_dir=",
    "setup": "# cluster.setup,",
    "environment": "export PYTHONPATH=",
    "signals": "# scancel and",
    "meeting": "code=75",
    "ranks": "  # One task per rank",
    "result": "  # Writes result.json",
    "requeue": "# 85: the ranks",
}


def slurm_blocks() -> Mapping[str, Callable[[], str]]:
    """``slurm_asks``, ``slurm_place`` ... as blocks of a page."""
    return {f"slurm_{name}": partial(_block, name) for name in _BEGINS}


def script() -> str:
    """The real script of a request, its paths as on somebody's machine."""
    config = from_dict(_ASKED)
    check(config)
    text = job_script(config, _RUN, plan_nodes(config, dp=4), cwd=_HOME)
    text = text.replace(sys.executable, "/home/me/.venv/bin/python")
    return text.replace(str(ROOT), "/home/me/foldpipe")


def parts() -> dict[str, str]:
    """The script, cut where the page has something to say; together they are the whole of it."""
    lines = script().splitlines()
    found: dict[str, list[str]] = {}
    waiting, name = dict(_BEGINS), ""
    for line in lines:
        for part, begin in waiting.items():
            if line.startswith(begin):
                name = part
                del waiting[part]
                break
        found.setdefault(name, []).append(line)
    assert list(found) == list(_BEGINS), "a line that begins a part has changed"
    return {part: "\n".join(text) for part, text in found.items()}


def _block(name: str) -> str:
    return f"```text\n{parts()[name].rstrip()}\n```"
