"""Row 5: damage is found before anything changes, and a kill never leaves a mixture.

The short versions are ``tests/strategies/runtime/storage/test_damage.py`` and ``test_killed.py``.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.commit import Saver
from tests.faults.results import record
from tests.strategies.runtime.storage.saving import save
from tests.strategies.runtime.storage.test_damage import damaged
from tests.strategies.runtime.storage.test_killed import run

pytestmark = pytest.mark.faults


def test_every_flip_zero_and_truncation_is_found(tmp_path: Path) -> None:
    whole, total, found = tmp_path / "step-1.ckpt", 3000, 0
    save(Saver(Exchange(None)), whole, 1, size=7)
    try:
        damaged(whole, tmp_path / "copies", total)
        found = total
    finally:
        record("5a", "flips, zeroes, truncations of a checkpoint are found", found, total, None)


def test_a_kill_at_every_call_that_changes_a_file(tmp_path: Path) -> None:
    points = 0
    try:
        points = sum(run(tmp_path, "calls=0")["calls"])
        assert points >= 50
    finally:
        what = "kill at each write, sync and rename: the last committed one loads"
        record("5b", what, points, max(points, 50), None)


@pytest.mark.parametrize(
    ("kind", "kills", "what"),
    [
        ("random", 300, "kill at random while a thread saves: never mixed steps"),
        ("ranks", 40, "kill of one of two saving ranks: the other hears of it"),
    ],
)
def test_kills_at_random(kind: str, kills: int, what: str, tmp_path: Path) -> None:
    passed, begun = 0, time.monotonic()
    try:
        assert run(tmp_path, f"{kind}={kills}")[kind] > 0
        passed = kills
    finally:
        average = (time.monotonic() - begun) / kills
        record("5c" if kind == "random" else "5d", what, passed, kills, average)
