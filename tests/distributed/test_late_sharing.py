"""What ranks tell each other of a step, told at the end of their lists as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.messages.control import Bulletin
from strategies.runtime.step.executor import Executor
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, train

pytestmark = pytest.mark.distributed


def train_noting(case: Case, late: bool) -> dict[str, Any]:
    """``train``, and for each pass whether its numbers were posted before its list had ended.

    ``late``: with hosts that are taken to run ahead of their device.
    """
    order: list[str] = []
    run, post = Executor.run, Bulletin.post

    def noting_run(*arguments: Any, **options: Any) -> Any:
        result = run(*arguments, **options)
        order.append("end")
        return result

    def noting_post(*arguments: Any) -> None:
        order.append("post")
        post(*arguments)

    with (
        mock.patch.object(Engine, "_runs_ahead", late),
        mock.patch.object(Executor, "run", noting_run),
        mock.patch.object(Bulletin, "post", noting_post),
    ):
        return train(case) | {"order": order}


def test_it_changes_no_loss_and_no_weight(ranks: Callable[[int], Ranks]) -> None:
    case = Case("1f1b", pp=2, dp=2, clip=0.05, overlap="zero1", steps=4)
    early, late = (ranks(4).run(train_noting, case=case, late=late) for late in (False, True))
    for before, after in zip(early, late, strict=True):
        assert before["order"] == ["post", "end"] * case.steps
        assert after["order"] == ["end", "post"] * case.steps
        assert after["losses"] == before["losses"]
        for name, value in before["parameters"].items():
            assert after["parameters"][name].equal(value)
