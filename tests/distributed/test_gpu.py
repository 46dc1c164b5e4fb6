"""Ranks that share one GPU: gloo staged through pinned memory, compared with plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.distributed.test_parity import check
from tests.ranks.pool import Ranks
from tests.ranks.training import Case

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", pp=1, accelerator="gpu"),
        Case("foldx_fifo", pp=2, accelerator="gpu"),
        Case("1f1b", pp=2, dp=2, clip=0.05, accelerator="gpu"),
    ],
    ids=["one-rank", "pp", "pp-dp-clip"],
)
def test_training_on_one_gpu_equals_plain_torch(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check(case, ranks)
