"""Clicks through the built playground page: ``make test-playground [ARGS="--only phone"]``.

Serves ``build/site``, computes with ``mode=simulate`` what every schedule must show, and lets
``clicks.mjs`` drive Debian's Chromium through playwright-core. Screenshots go to
``build/playground_pictures``, to be looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from launcher.__main__ import main as launcher
from launcher.report.summary import format_duration
from strategies.schedules import SCHEDULES
from tools.docs.playground import NPM, ROOT

SITE = ROOT / "build" / "site"
PICTURES = ROOT / "build" / "playground_pictures"
LLAMA = (
    "schedule=interleaved_1f1b", "pp=8", "num_microbatches=16", "costs=analytic",
    "model=llama2_7b", "hardware=h100", "trainer.precision=bf16-mixed",
)  # fmt: skip
# All that is no name, no version and no text.
FIGURES = (
    "makespan", "period", "bubble_ratio", "lower_bound", "binding_bound", "lb1", "lb2",
    "bound_gap", "gap_to_ideal", "peak_activations", "recomputed", "exposed_grad_reduce",
    "weight_copies", "synchronous", "stages_per_rank", "num_microbatches", "group",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="checks whose name has this text")
    only = parser.parse_args().only
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None or shutil.which("node") is None:
        sys.stderr.write("clicking needs node and chromium; CHROMIUM=path names another browser\n")
        return 2
    if not (SITE / "playground" / "pyodide").is_dir():
        sys.stderr.write("build/site has no playground: make playground-packages docs\n")
        return 2
    PICTURES.mkdir(parents=True, exist_ok=True)
    with _server() as origin, tempfile.TemporaryDirectory() as folder:
        plan = {
            "origin": origin,
            "npm": str(NPM.parent),
            "chromium": chromium,
            "pictures": str(PICTURES),
            "only": only,
            "figures": FIGURES,
            "schedules": {name: _expected(name, Path(folder)) for name in SCHEDULES},
            "llama": _simulated(LLAMA, Path(folder) / "llama"),
        }
        file = Path(folder) / "plan.json"
        file.write_text(json.dumps(plan))
        script = Path(__file__).with_name("clicks.mjs")
        return subprocess.run(["node", str(script), str(file)]).returncode


def _expected(schedule: str, folder: Path) -> dict[str, Any]:
    words = (f"schedule={schedule}", "pp=4", "num_microbatches=8", "costs=uniform")
    result = _simulated(words, folder / schedule)
    return result | {"shown": format_duration(result["makespan"], "F")}


def _simulated(words: Sequence[str], folder: Path) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        code = launcher(["mode=simulate", *words, f"hydra.run.dir={folder}"])
    assert code == 0, words
    found = json.loads((folder / "result.json").read_text())
    assert isinstance(found, dict)
    return found


class _Quiet(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A page that is closed while it loads ends its connections."""


@contextlib.contextmanager
def _server() -> Iterator[str]:
    handler = partial(_Quiet, directory=str(SITE))
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
