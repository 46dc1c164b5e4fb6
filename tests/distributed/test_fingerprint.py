"""Ranks that do not run the same are refused by all of them, before anything is trained."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from tests.faults.mutations import fit_mutated
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("kind", "seed", "what"),
    [
        ("order", 1, "programs"),
        ("size", 1, "versions, configuration and model"),
        ("type", 3, "first batch"),
    ],
)
def test_all_ranks_name_the_one_that_differs(
    kind: str, seed: int, what: str, ranks: Callable[[int], Ranks]
) -> None:
    answers = ranks(2).run(fit_mutated, seed=seed, kind=kind, victim=1, pp=2, dp=1)
    messages = {message for message, _ in answers}
    (message,) = messages
    assert message.startswith(
        f"MismatchError: the ranks do not have the same {what}, so nothing was trained:\n  "
    )
    assert " on rank 0, " in message
    assert message.endswith(
        f"\n(ranks 0, 1 on {socket.gethostname()}) Give all of them the same code, packages, "
        "configuration and data."
    )
    assert [steps for _, steps in answers] == [0, 0]
