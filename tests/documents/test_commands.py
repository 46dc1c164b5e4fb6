"""Every command in the documents is run.

In ``make test`` in a short form: a command line of the launcher is composed, checked and compiled,
without starting a rank; what names a target, an extra or a benchmark must name one that exists.
``make test-docs`` follows every page literally, from an empty folder: its files are written, its
commands typed, with few steps.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.processes.local import our_path
from launcher.processes.rank_server import SHARED
from launcher.resolve import resolve
from strategies.schedules import SCHEDULES
from tests.documents.steps import Command, File, Output, shown_steps, steps
from tests.documents.test_keys import undocumented
from tests.launcher.command_line import run_here
from tests.launcher.runs import launch
from tests.ranks.rank_server import rank_server_address

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLLOWED = [page for page in PAGES if any(isinstance(s, Command) for s in steps(page, ROOT))]

# Pages of schedules are made from one template; all their YAML is composed elsewhere.
ACCEPTED = [
    page
    for page in FOLLOWED
    if page.parent.name != "schedules" or page.stem in ("index", "custom", "zb_v")
]

# Commands that no test types as they stand: the page (or a folder of pages) and how the command
# begins -> the reason, and the test that runs their short form.
NOT_TYPED: dict[tuple[str, str], str] = {
    ("docs/guides/asynchronous-training.md", "cd examples; bash late_gradients.sh"): (
        "trains for minutes; tests/distributed/test_example_scripts.py"
    ),
    ("", "python -m launcher demo"): "trains; tests/launcher/tools/test_demo.py",
    ("docs/guides/checking-a-schedule.md", "python -m launcher check theirs.csv"): (
        "ends with 1, as the page says; tests/launcher/test_check_order.py"
    ),
    ("docs/guides/explaining-a-trace.md", "python -m launcher explain"): (
        "needs traces; tests/launcher/test_explained.py"
    ),
    ("", "python -m launcher doctor"): "measures for seconds; tests/launcher/tools/test_doctor.py",
    ("docs/guides/sweeps.md", "python -m launcher -m sweep.trials="): (
        "searches for minutes; tests/launcher/test_search.py"
    ),
}

# Keys that say where a file is to be written.
MAKES = re.compile(r"(?:profile\.file|profile\.hardware|costs\.refine|export\.path)=(\S+)")

# Appended where `make test-docs` trains: what makes a run short.
SHORT = ("trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.enable_progress_bar=false")
_STARTS_NOTHING = {"simulate", "plan", "validate", "collect", "check"}


# Modes without ranks; what they print is the same on every machine.
_QUIET = ("mode=simulate", "mode=plan", "mode=validate", "--help", "check")

_LONG = {"-m", "planner.num_gpus=64"}


def is_quiet(words: list[str]) -> bool:
    return any(word in _QUIET for word in words)


def printed_every_day(page: Path) -> set[str]:
    """The commands that tests/documents/test_outputs.py runs: their output is on the page.

    Not a plan for 64 GPUs, which takes seconds: ``make test-docs`` compares it.
    """
    found: set[str] = set()
    command: Command | None = None
    for step in shown_steps(page, ROOT):
        if isinstance(step, Command):
            command = step
        elif isinstance(step, Output) and command is not None:
            words = command.launcher
            if words is not None and is_quiet(words) and not _LONG & {*words}:
                found.add(command.place)
    return found


def _commands(page: Path) -> list[Command]:
    return [step for step in steps(page, ROOT) if isinstance(step, Command)]


def _reason(command: Command) -> str | None:
    for (page, start), reason in NOT_TYPED.items():
        if command.place.startswith(page) and command.text.startswith(start):
            return reason
    return None


def _mode(words: list[str]) -> str:
    return next((word[5:] for word in words if word.startswith("mode=")), "train")


def test_every_exception_is_still_needed() -> None:
    found = [command for page in PAGES for command in _commands(page)]
    for page, start in NOT_TYPED:
        assert any(
            command.place.startswith(page) and command.text.startswith(start) for command in found
        ), (page, start)


@pytest.fixture(autouse=True)
def _no_schedule_stays() -> Iterator[None]:
    """A page's own schedule is known to the process that has read it, and this one reads many."""
    known = {*SCHEDULES}
    yield
    for name in {*SCHEDULES} - known:
        del SCHEDULES[name]


@pytest.mark.parametrize("page", ACCEPTED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_are_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher takes each; with a built-in model its programs compile."""
    monkeypatch.chdir(tmp_path)
    printed = printed_every_day(page)
    later: set[str] = set()  # what commands of the page would have made, had they been run
    for step in steps(page, ROOT):
        if isinstance(step, File):
            _write(step, tmp_path)
        elif _reason(step) is None and step.place not in printed:
            if not any(name in step.text for name in later):
                _accept(step, tmp_path, monkeypatch)
            later |= {Path(path).parts[0] for path in MAKES.findall(step.text)}


def _write(file: File, folder: Path) -> None:
    path = folder / file.path
    assert path.resolve().is_relative_to(folder.resolve()), file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.text, encoding="utf-8")


def _accept(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command.words
    launcher = command.launcher
    if launcher is not None:
        if {"-m", "--multirun"} & {*launcher}:
            launcher = [*launcher, "--help"]  # checks every job of a sweep, and starts none
        with monkeypatch.context() as patch:
            if any(folder.rglob("*.py")):
                patch.setenv(SHARED, rank_server_address())  # imports the page's own files
                patch.setenv("OMP_NUM_THREADS", "1")
            done = run_here([*launcher, *_unsubmitted(launcher)], folder, patch, _compiled)
        assert done.code == 0, f"{command.place}: {command.text}\n{done.errors}"
    elif words[0] == "make":
        assert words[1] in _targets(), f"{command.place}: no target {words[1]}"
    elif words[:2] == ["pip", "install"]:
        optional = _project()["optional-dependencies"]
        asked = {".", *(f".[{extra}]" for extra in optional), *chain(*optional.values())}
        assert {*words[2:]} <= asked, command.place
    elif words[0] == "python" and words[1].endswith(".py"):
        compile((folder / words[1]).read_text(encoding="utf-8"), words[1], "exec")
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / Path(*words[2].split("."))).with_suffix(".py").is_file(), command.place
    else:
        raise AssertionError(
            f"{command.place}: {command.text}: no test types it. Say why in NOT_TYPED, or show it "
            "in a block with a language of its own (```text)."
        )


def _unsubmitted(words: list[str]) -> list[str]:
    """Nothing goes to a cluster: the job script is written, and that is all."""
    return ["cluster.submit=false"] if "cluster=slurm" in words else []


def _compiled(config: LaunchConfig, run_dir: Path) -> int:
    """In place of a mode's command: the programs of the request, where no rank is needed."""
    if config.mode not in ("plan", "check") and config.model.name != "hf":
        resolve(config)
    return 0


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def _project() -> dict[str, dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_script(script: str, folder: Path) -> str:
    """What a page's own script prints."""
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": our_path(os.environ), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    """Literally, from an empty folder; trainings take two steps."""
    for step in steps(page, ROOT):
        if isinstance(step, File):
            _write(step, tmp_path)
            continue
        words = step.launcher
        if words is None and step.words[0] == "python" and step.words[1].endswith(".py"):
            run_script(step.words[1], tmp_path)
        if words is None or _reason(step) is not None:
            continue
        mode = _mode(words)
        # What is pruned at given steps has to come so far.
        whole = {"--help", "--cfg"} & {*words} or "sweep.prune_at=" in step.text
        short = [] if mode in _STARTS_NOTHING or whole else SHORT
        typed = {word.partition("=")[0] for word in words}
        added = [word for word in short if word.partition("=")[0] not in typed]
        added += _unsubmitted(words)
        done = launch([*words, *added], tmp_path, timeout_s=300)
        assert done.code == 0, f"{step.place}: {step.text}\n{done.errors}\n{done.output}"
    for path in tmp_path.rglob("result.json"):
        assert undocumented(json.loads(path.read_text())) == []
