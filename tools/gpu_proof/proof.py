"""Runs stages, each in a process with a deadline of its own, and keeps what each has found.

A stage that hangs, crashes or needs more memory than there is costs its own time only. The file is
written after each stage. A stage that has passed is not run again for the same sources, card and
torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "gpu-wheels"
_SOURCES = ("conf", "launcher", "strategies", "tests", "tools")
_PATIENCE = 4  # times the deadline in a rehearsal, on two cores of a laptop
_LEAST_S = 10.0  # in which no stage can show anything
_LAST_WORDS = 1500  # characters of what a stage has written to stderr

Status = Literal["passed", "failed", "deadline", "skipped"]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the proof.

    Attributes:
        name: Key in the file.
        function: ``module:function``, called with a ``Setting``; what it returns is kept.
        deadline_s: After so many seconds its processes are killed.
        part: 1 or 2; each part ends within five minutes.
        needs_gb: Free device memory without which it is skipped.
    """

    name: str
    function: str
    deadline_s: float
    part: int = 1
    needs_gb: float = 1.0


@dataclass(frozen=True, slots=True)
class Card:
    """Where the proof runs.

    Attributes:
        device: ``cuda`` or ``cpu``.
        name: As the driver names it.
        torch: Version of torch.
        free_gb: Device memory that nothing uses when the proof begins.
        total_gb: All of it.
    """

    device: str
    name: str
    torch: str
    free_gb: float
    total_gb: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What a stage's function is told.

    Attributes:
        device: ``cuda`` or ``cpu``.
        quick: A rehearsal: the smallest sizes that run everything.
        seconds: Its deadline.
        file: The proof so far, as JSON; earlier stages' results can be read there.
        partial: Where ``keep`` writes.
    """

    device: str
    quick: bool
    seconds: float
    file: Path
    partial: Path

    def keep(self, found: Mapping[str, Any]) -> None:
        """Saves what has been found so far, for the case that the deadline comes first."""
        _replace(self.partial, {"found": dict(found)})

    def earlier(self, stage: str) -> dict[str, Any]:
        """What an earlier stage has found; empty if it has not run."""
        entry = read(self.file)["stages"].get(stage, {})
        found: dict[str, Any] = entry.get("found", {})
        return found


def read(file: Path) -> dict[str, Any]:
    """The proof so far."""
    if not file.exists():
        return {"format": 1, "stages": {}}
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def prove(
    groups: Iterable[Sequence[Stage]],
    card: Card,
    file: Path,
    *,
    limit_s: float,
    quick: bool,
    again: bool,
    say: Say,
) -> bool:
    """Runs groups of stages one after the other; the stages of a group run side by side.

    Args:
        groups: In order of their value.
        card: What they run on.
        file: Is read, for stages that have passed before, and written.
        limit_s: For all of them together: what comes later is skipped.
        quick: Whether this is a rehearsal.
        again: Whether to run stages that have passed before, too.
        say: Prints a line.

    Returns:
        Whether everything that ran has passed.
    """
    sources, commit = digest(), commit_name()
    passed, until = True, time.monotonic() + limit_s
    for group in groups:
        running: list[tuple[Stage, _Child, dict[str, Any]]] = []
        for stage in group:
            before = read(file)["stages"].get(stage.name, {})
            key = {"sources": sources, "card": card.name, "torch": card.torch}
            same = all(before.get(name) == value for name, value in key.items())
            if same and before.get("status") == "passed" and not again:
                say(f"{stage.name}: has passed before")
                continue
            entry = {**key, "commit": commit, "rehearsal": quick, "began": _now()}
            left, reason = until - time.monotonic(), ""
            if stage.needs_gb > card.free_gb:
                reason = (
                    f"needs {stage.needs_gb:g} GB of device memory, and {card.free_gb:.1f} of "
                    f"{card.total_gb:.1f} GB are free"
                )
            elif left < _LEAST_S:
                reason = f"the {limit_s:g} s of its part are over"
            if reason:
                _enter(file, stage.name, entry | {"status": "skipped", "reason": reason})
                say(f"{stage.name}: skipped, {reason}")
                continue
            seconds = min(left, stage.deadline_s * (_PATIENCE if quick else 1))
            running.append((stage, _Child(stage, card, file, seconds, quick=quick), entry))
        stopped = False
        while running:
            for one in [one for one in running if stopped or one[1].has_ended()]:
                running.remove(one)
                stage, child, entry = one
                result = child.result()
                _enter(file, stage.name, entry | result)
                passed = passed and result["status"] == "passed"
                reason = f": {result['reason'].splitlines()[-1][:200]}" if result["reason"] else ""
                say(f"{stage.name}: {result['status']} in {result['took_s']:.1f} s{reason}")
            try:
                time.sleep(0.05)
            except KeyboardInterrupt:  # What has been found so far is kept.
                stopped = True
        if stopped:
            raise KeyboardInterrupt
    return passed


class _Child:
    """The process of a stage, and all that it starts."""

    def __init__(
        self, stage: Stage, card: Card, file: Path, deadline_s: float, *, quick: bool
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="foldpipe-proof-")
        self._result = Path(self._folder.name) / "result.json"
        self._errors = (Path(self._folder.name) / "stderr").open("w+", errors="replace")
        self._begun = time.monotonic()
        self._deadline_s = deadline_s
        told = {
            "function": stage.function,
            "setting": {
                "device": card.device,
                "quick": quick,
                "seconds": self._deadline_s,
                "file": str(file.absolute()),
                "partial": str(self._result),
            },
        }
        if quick:
            self._process: subprocess.Popen[bytes] | _Forked = _Forked(told, self._errors.fileno())
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.gpu_proof.stage", json.dumps(told)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
        )

    def has_ended(self) -> bool:
        """By itself, or because its deadline has passed."""
        late = time.monotonic() - self._begun > self._deadline_s
        return late or self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        """What it has found; what still runs of it is killed."""
        code = self._process.poll()
        took = time.monotonic() - self._begun
        # Also what a stage has left running: its session is its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-_LAST_WORDS:].strip()
        self._errors.close()
        written = json.loads(self._result.read_text()) if self._result.exists() else {}
        self._folder.cleanup()
        status: Status = "passed" if code == 0 else "failed" if code is not None else "deadline"
        if code is None:
            late = took > self._deadline_s
            reason = f"did not end within {self._deadline_s:g} s" if late else "was stopped"
            reason = f"{reason}; {said}"
        elif code < 0:
            reason = f"was killed by {signal.Signals(-code).name}; {said}"
        else:
            reason = "" if code == 0 else said or f"exit code {code}"
        if written.get("failed"):
            status, reason = "failed", written["failed"]
        found = written.get("found", {})
        return {"status": status, "reason": reason, "took_s": round(took, 2), "found": found}


class _Forked:
    """A stage's process in a rehearsal: a fork of this one, which has imported what stages do.

    Importing is most of what a rehearsal takes.
    """

    def __init__(self, told: Mapping[str, Any], output: int) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.chdir(ROOT)
                for number in (1, 2):
                    os.dup2(output, number)
                run_stage(json.dumps(told))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(1)

    def poll(self) -> int | None:
        """The exit code; negative for a signal, None while it runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        """The exit code, when it has ended."""
        return self._look(0)

    def _look(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def import_all(groups: Iterable[Sequence[Stage]]) -> None:
    """Imports what the stages of a rehearsal import, before they are forked."""
    import importlib

    for group in groups:
        for stage in group:
            importlib.import_module(stage.function.partition(":")[0])


def run_stage(told: str) -> None:
    """In the stage's own process: calls its function and keeps what it returns."""
    import importlib

    asked = json.loads(told)
    setting = asked["setting"]
    setting["file"], setting["partial"] = Path(setting["file"]), Path(setting["partial"])
    module, _, name = asked["function"].partition(":")
    found = getattr(importlib.import_module(module), name)(Setting(**setting))
    failed = found.pop("failed", None)
    _replace(setting["partial"], {"found": found, "failed": failed})
    sys.stdout.flush()
    os._exit(0)  # No destructor of a communicator may hang.


def _enter(file: Path, name: str, entry: Mapping[str, Any]) -> None:
    whole = read(file)
    whole["stages"][name] = dict(entry)
    _replace(file, whole)


def _replace(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a file in one go: a line per stage, six digits, places relative to the checkout."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(file.name + ".new")
    shown = json.loads(
        json.dumps(content, default=str), parse_float=lambda t: float(f"{float(t):.6g}")
    )
    parts = shown.pop("stages", None)
    text = json.dumps(shown)
    if parts is not None:
        lines = (f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in parts.items())
        text = text[:-1] + ', "stages": {\n' + ",\n".join(lines) + "\n}}"
    new.write_text(text.replace(str(ROOT), ".") + "\n")
    new.replace(file)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


def digest() -> str:
    """Of all sources that a stage could run: a stage has passed for these, or for others."""
    found = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts:
                found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def commit_name() -> str:
    """The commit that these sources are of; of a copy that which ``make gpu-wheels`` has noted."""
    noted = WHEELS / "COMMIT"
    if noted.exists():
        name, _, sources = noted.read_text().strip().partition(" ")
        if sources == digest():
            return name
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError):
        said = subprocess.run(asked, capture_output=True, text=True)
        if said.returncode == 0:
            return said.stdout.strip()
    return "unknown"


_LOOK = """
import json, torch
if torch.cuda.is_available():
    free, total = torch.cuda.mem_get_info(0)
    print(json.dumps([torch.cuda.get_device_name(0), torch.__version__, free / 1e9, total / 1e9]))
else:
    print(json.dumps(["none", torch.__version__, 0, 0]))
"""


def look(*, rehearse: bool) -> Card | None:
    """The GPU, asked for in a process of its own; None if torch sees none."""
    if rehearse:
        from importlib.metadata import version

        return Card("cpu", "CPU (rehearsal)", version("torch"), float("inf"), float("inf"))
    said = subprocess.run(
        [sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=120, check=True
    )
    name, torch_version, free, total = json.loads(said.stdout)
    return None if name == "none" else Card("cuda", name, torch_version, free, total)
