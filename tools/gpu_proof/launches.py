"""First light: the launcher's own commands on the card, and that they agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.gpu_proof.proof import ROOT, Setting

_MODEL = (
    "model=tiny", "model.layers=8", "model.hidden=256", "model.heads=4", "model.kv_heads=4",
    "model.ffn=768", "model.sequence=256",
)  # fmt: skip
_TINY = (
    "model=tiny", "model.layers=4", "model.hidden=16", "model.heads=2", "model.kv_heads=1",
    "model.ffn=24", "model.sequence=16",
)  # fmt: skip
# Alike in what they compute: 8 sequences a step, in 4 microbatches.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "pp1": ("pp=1",),
    "pp2_auto": ("pp=2",),
    "pp2_staged": ("pp=2", "cluster.backend=staged"),
    "pp2_shared": ("pp=2", "cluster.backend=shared"),
    "pp2_fresh": ("pp=2", "cluster.start=fresh"),
    "pp2_fork": ("pp=2", "cluster.start=fork"),
    "pp4_zb_v": ("pp=4", "schedule=zb_v"),
    "pp2_foldx": ("pp=2", "schedule=foldx_fifo"),
}
_FEW = ("pp1", "pp2_auto")
_TOLERANCE = 2e-4  # of a loss after ten steps in fp32, sums in another order


def words_of(setting: Setting, model: tuple[str, ...]) -> list[str]:
    """What every run of the launcher is asked for here."""
    accelerator = "gpu" if setting.device == "cuda" else "cpu"
    return [
        *model, f"trainer.accelerator={accelerator}", "trainer.limit_val_batches=0",
        "trainer.save_last=false", "trainer.enable_progress_bar=false",
    ]  # fmt: skip


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """``python -m launcher`` in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "launcher", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Exit code, result and last words of a run; one that does not end is killed."""
    try:
        said, _ = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        said = "did not end; " + process.communicate()[0]
    found: dict[str, Any] = {"exit": process.returncode}
    results = list(folder.rglob("result.json"))
    if process.returncode == 0 and results:
        found["result"] = json.loads(results[0].read_text())
    else:
        found["says"] = said[-1200:]
    return found


def launches(setting: Setting) -> dict[str, Any]:
    """The same training in several layouts: each ends well, and all have the same losses."""
    model = _TINY if setting.quick else _MODEL
    steps = 3 if setting.quick else 10
    until = time.monotonic() + setting.seconds - 4
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        running = {
            layout: (
                start(
                    [
                        *words_of(setting, model), *words, "num_microbatches=4",
                        "data.microbatch_size=2", f"trainer.max_steps={steps}",
                    ],
                    Path(name) / layout,
                ),
                Path(name) / layout,
            )
            for layout, words in LAYOUTS.items()
            if not setting.quick or layout in _FEW
        }  # fmt: skip
        for layout, (process, folder) in running.items():
            one = ended(process, folder, until - time.monotonic())
            result = one.pop("result", {})
            kept = ("loss_first", "loss_last", "step_time_s", "backend", "start", "startup_s")
            rows[layout] = one | {key: result[key] for key in kept if key in result}
            setting.keep({"rows": rows})
    whole = rows["pp1"].get("loss_last")
    wrong = [
        layout
        for layout, row in rows.items()
        if row["exit"] != 0
        or whole is None
        or abs(row["loss_last"] - whole) > _TOLERANCE * abs(whole)
    ]
    found: dict[str, Any] = {"rows": rows, "tolerance": _TOLERANCE}
    if wrong:
        found["failed"] = "not as with one rank: " + ", ".join(wrong)
    return found
