"""Killed at any moment of a save, the last committed checkpoint loads, and nothing is a mixture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be had: a kill loses nothing that was written, synced or not."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path / "checkpoints"
        return
    with tempfile.TemporaryDirectory(dir=memory) as found:
        yield Path(found) / "checkpoints"


def run(folder: Path, kind: str, count: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.strategies.runtime.storage.killed", str(folder)]
    done = subprocess.run([*words, kind, str(count)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_at_each_call_that_changes_a_file(folder: Path) -> None:
    points = run(folder, "calls", 0)["points"]
    assert sum(points) >= 50


@pytest.mark.full
def test_at_random_while_a_thread_saves(folder: Path) -> None:
    assert run(folder, "random", 12)["reached"] > 0


def test_one_of_two_ranks(folder: Path) -> None:
    assert run(folder, "ranks", 2)["reached"] > 0


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["random", "ranks"])
def test_many_times(kind: str, tmp_path: Path) -> None:
    assert run(tmp_path / "checkpoints", kind, 300 if kind == "random" else 40)["reached"] > 0
