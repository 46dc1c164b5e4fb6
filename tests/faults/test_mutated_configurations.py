"""Row 9: wrong configurations end in one message, in time, with nothing started or left behind.

All go through the launcher's own ``main`` in one process; what an accepted one would start is
replaced. ``tests/launcher/test_cli_errors.py`` has 400 mutated command lines in every run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.mutated_requests import mutations, write
from tests.faults.results import record
from tests.launcher.command_line import run_here

LIMIT_S = 3.0  # of the processor: others may use it meanwhile


@dataclass
class Verdict:
    """What became of them; ``wrong`` shows those that did not go as they should."""

    refused: int = 0
    worst_s: float = 0.0
    wrong: list[object] = field(default_factory=list)


def judge(count: int, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """Runs them all."""
    verdict = Verdict()
    for number, mutation in enumerate(mutations(count, seed=seed)):
        words = write(mutation, folder / f"options{number}")
        begun = time.process_time()
        try:
            done = run_here(words, folder / f"cwd{number}", monkeypatch)
            took = time.process_time() - begun
            verdict.worst_s = max(verdict.worst_s, took)
            assert took < LIMIT_S
            assert "Traceback" not in done.errors
            if done.code:
                done.assert_refused()
                verdict.refused += 1
        except BaseException as error:  # a traceback of ours ends here
            verdict.wrong.append((words, mutation.files, repr(error)))
    return verdict


def test_60_mutated_configurations(tmp_path, monkeypatch):
    verdict = judge(60, 7, tmp_path, monkeypatch)
    assert verdict.wrong == []
    assert 30 < verdict.refused < 60


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(9, 13))
def test_250_mutated_configurations(seed, tmp_path, monkeypatch):
    """1,000 in all."""
    count = 250
    verdict = judge(count, seed, tmp_path, monkeypatch)
    what = f"mutated configurations of seed {seed}: one message, nothing started"
    record(9, what, count - len(verdict.wrong), count, verdict.worst_s)
    assert verdict.wrong == []
    assert count / 2 < verdict.refused < count
