"""Row 14: ranks that do not run the same are refused before the first step."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.faults.mutations import KINDS, fit_mutated
from tests.faults.results import record
from tests.ranks.pool import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

COUNT = 50


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def test_mutated_plans_are_all_caught_before_the_first_step(four):
    caught, worst, escaped = 0, 0.0, []
    for seed in range(COUNT):
        kind, victim = KINDS[seed % len(KINDS)], seed // len(KINDS) % 4
        begin = time.monotonic()
        answers = four.run(fit_mutated, seed=seed, kind=kind, victim=victim, pp=2, dp=2)
        worst = max(worst, time.monotonic() - begin)
        messages = {message for message, _ in answers}
        told = all("MismatchError: the ranks do not have the same" in m for m in messages)
        named = all(f"rank {victim}" in m or f"ranks {victim}" in m for m in messages)
        if told and named and {steps for _, steps in answers} == {0}:
            caught += 1
        else:
            escaped.append((seed, kind, victim, answers))
    what = "mutated plans (order, tag, size, type) of one rank: refused, nothing trained"
    record(14, what, caught, COUNT, worst)
    assert not escaped, escaped[:3]
    assert socket.gethostname() in messages.pop()
