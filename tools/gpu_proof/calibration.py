"""``mode=profile`` on the card, and what its figures predict of steps that were measured."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tools.gpu_proof.configurations import (
    LLAMA_1B,
    ROWS,
    TINY,
    composed,
    measure,
    predicted_of,
    summary,
)
from tools.gpu_proof.kernels import described
from tools.gpu_proof.launches import ended, start
from tools.gpu_proof.proof import Setting
from tools.gpu_proof.timing import Clock

# All in bf16-true, which the profile is made in.
_PREDICTED = ("base", "small_microbatches", "large_microbatches", "recompute_full", "interleaved",
              "zb_v")  # fmt: skip
_SIZES = "[1,4,8]"


def profile(setting: Setting) -> dict[str, Any]:
    """Profiles the layers, predicts rows with the profile, and holds them to measured steps."""
    clock = Clock(setting.device, quick=setting.quick)
    names = ("small_microbatches",) if setting.quick else _PREDICTED
    accelerator, sizes = ("gpu" if clock.gpu else "cpu"), ("[1]" if setting.quick else _SIZES)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "profile.json"
        words = [
            "mode=profile", *(TINY if setting.quick else LLAMA_1B), "trainer.precision=bf16-true",
            f"trainer.accelerator={accelerator}", f"profile.microbatch_sizes={sizes}",
            "profile.iterations=3", f"profile.file={file}",
        ]  # fmt: skip
        folder = Path(name) / "run"
        said = ended(start(words, folder), folder, setting.seconds * 0.6)
        found: dict[str, Any] = {"exit": said["exit"], "profiled": file.exists()}
        if said["exit"] != 0 or not file.exists():
            return found | {"failed": f"mode=profile: {said.get('says', '')[-600:]}"}
        setting.keep(found)
        earlier = setting.earlier("configurations").get("rows", {})
        rows: dict[str, Any] = {}
        for row in names:
            costs = ("costs=profiled", f"costs.file={file}")
            run = composed((*ROWS[row], *costs), quick=setting.quick, hardware=_hardware(setting))
            rows[row] = {"predicted": predicted_of(run)}
            measured = earlier.get(row, {})
            if "step_s" not in measured or setting.quick:
                clock.warm(0.5)
                plain = composed(ROWS[row], quick=setting.quick, hardware=_hardware(setting))
                measured = measure(plain, clock, steps=1 if setting.quick else 4)
            rows[row] |= {key: measured[key] for key in ("step_s", "peak_bytes") if key in measured}
            setting.keep(found | {"rows": rows})
    return found | {"rows": rows, "summary": summary(rows)}


def _hardware(setting: Setting) -> str:
    return described(setting.device)
