"""Layouts, schedules and precisions together, on ranks that share a GPU, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.layouts import Layout, all_layouts, check, pairwise
from tests.ranks.pool import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.mark.parametrize("backend", ["shared", "staged"])
@pytest.mark.parametrize("layout", pairwise(all_layouts()), ids=str)
def test_ranks_that_share_a_gpu_train_as_one_process_does(
    layout: Layout, backend: str, ranks: Callable[[int], Ranks]
) -> None:
    check(layout, ranks, backend=backend, accelerator="gpu")
