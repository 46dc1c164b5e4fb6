"""The documents' Python runs as it stands there, and the README is short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.processes.local import our_path
from strategies.schedules import SCHEDULES

README = Path(__file__).resolve().parents[1] / "README.md"
# Other pages' Python stands in files that their commands use (tests/documents/test_commands.py).
PAGES = [README, README.parent / "docs" / "guides" / "lightning-module.md"]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]


def _name(block: str) -> str:
    found = re.search(r"^class (\w+)", block, re.MULTILINE)
    return found[1] if found else block.split("\n", 1)[0][:40]


def test_there_are_examples() -> None:
    names = [_name(block) for block in BLOCKS]
    assert len(set(names)) == len(names) >= 2
    assert any("PipelineStrategy" in block for block in BLOCKS)


def test_the_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 160


def test_the_readme_counts_the_schedules_that_there_are() -> None:
    assert f"foldpipe has {len(SCHEDULES)}." in README.read_text(encoding="utf-8")
    index = (README.parent / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"**{len(SCHEDULES)} schedules**" in index


def _cost(block: str) -> list[pytest.MarkDecorator]:
    """Those that start ranks take seconds for it."""
    return [pytest.mark.distributed, pytest.mark.full] if "Trainer" in block else []


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=_cost(block), id=_name(block)) for block in BLOCKS]
)
def test_an_example_runs_as_it_is(block: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": our_path(os.environ), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    if "max_epochs=2" in block:
        assert "`max_epochs=2` reached" in done.stderr
