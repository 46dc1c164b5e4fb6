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


@pytest.fixture(scope="module")
def everyday() -> Iterator[dict[str, Any]]:
    """In memory where that can be had: a kill loses nothing that was written, synced or not."""
    memory = Path("/dev/shm")
    folder = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=folder) as found:
        yield run(Path(found), "every=3", "ranks=2")


def run(folder: Path, *kinds: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.strategies.runtime.storage.killed", str(folder)]
    done = subprocess.run([*words, *kinds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_at_each_third_call_that_changes_a_file(everyday: dict[str, Any]) -> None:
    assert everyday["every"] >= 25


def test_one_of_two_ranks(everyday: dict[str, Any]) -> None:
    assert everyday["ranks"] > 0


@pytest.mark.full
def test_at_each_call_with_and_without_an_older_one_of_the_name(tmp_path: Path) -> None:
    assert sum(run(tmp_path, "calls=1")["calls"]) >= 50


@pytest.mark.full
def test_at_random_while_a_thread_saves(tmp_path: Path) -> None:
    assert run(tmp_path, "random=12")["random"] > 0
