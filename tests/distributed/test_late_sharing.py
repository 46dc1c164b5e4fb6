"""What ranks tell each other of a step, told at the end of their lists as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from strategies.runtime.engine.rank_engine import Engine
from tests.distributed.pool import Ranks
from tests.distributed.training import Case, train

pytestmark = pytest.mark.distributed


def train_late(**arguments: Any) -> dict[str, Any]:
    """``train`` with hosts that are taken to run ahead of their device."""
    with mock.patch.object(Engine, "_runs_ahead", True):
        return train(**arguments)


def test_it_changes_no_loss_and_no_weight(ranks: Callable[[int], Ranks]) -> None:
    case = Case("1f1b", pp=2, dp=2, clip=0.05, overlap="zero1")
    early, late = (ranks(4).run(function, case=case) for function in (train, train_late))
    for before, after in zip(early, late, strict=True):
        assert after["losses"] == before["losses"]
        for name, value in before["parameters"].items():
            assert after["parameters"][name].equal(value)
