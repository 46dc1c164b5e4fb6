"""The tests that need a GPU: training in every layout against plain torch on the same card."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from tools.gpu_proof.proof import ROOT, Setting

_AT_A_TIME = 8
_REPORTS_S = 12
# The first is the stage `speed`, and precisions are held to a plain loop in test_precisions.py.
_CHOSEN = "not uses_half_of_the_gpu and not short_types_learn"
_FILES = (
    "tests/gpu", "tests/distributed/test_gpu.py", "tests/strategies/runtime/step/test_recompute.py",
    "tests/strategies/runtime/storage/test_saver_host_copy.py",
)  # fmt: skip
_REHEARSED = (
    "tests/gpu/test_numerics_on_a_cpu.py", "-m", "not full", "-k", "choices or layout_is_one",
)  # fmt: skip


def numerics(setting: Setting) -> dict[str, Any]:
    """Runs ``pytest -m gpu``; of a rehearsal the same tests' functions on a CPU."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        chosen = (*_FILES, "-m", "gpu", "-k", _CHOSEN,
                  "-n", str(_AT_A_TIME))  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-x" if setting.quick else "--maxfail=1000",
            "-p", "no:cacheprovider", "-p", "no:benchmark", f"--junit-xml={report}",
            *(_REHEARSED if setting.quick else chosen),
        ]  # fmt: skip
        log = Path(name) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, env=dict(os.environ)
            )
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(setting.seconds - _REPORTS_S - 2)
            if code is None:  # It writes its report of what has ended by then.
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_REPORTS_S)
        said = log.read_text(errors="replace")
        found: dict[str, Any] = {"exit": code}
        if report.exists():
            found["tests"] = read_report(report)
        else:
            found["says"] = said[-6000:]
        wrong = [
            name for name, test in found.get("tests", {}).items() if test["outcome"] == "failed"
        ]
        if code != 0:
            ended = "" if code is not None else "not all ended in time; "
            found["failed"] = f"{ended}{len(wrong)} failed: {', '.join(wrong)}"
            found["says"] = said[-6000:]
        return found


def read_report(file: Path) -> dict[str, Any]:
    """Name of a test to its outcome, seconds and the last lines of what it says."""
    found: dict[str, Any] = {}
    for case in ET.parse(file).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        row: dict[str, Any] = {"outcome": "passed", "took_s": float(case.get("time", 0))}
        for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            said = case.find(kind)
            if said is not None:
                row["outcome"] = outcome
                text = f"{said.get('message', '')}\n{said.text or ''}"
                row["says"] = text[:400] + " ... " + text[-1200:] if len(text) > 1600 else text
        found[name] = row
    return found
