"""On a GPU: steps that are left out, loss scales, and checkpoints, on ranks that share it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.steps import BAD_CASES, SPOILED, check_resume, check_skip, check_spoiled, check_stop
from tests.ranks.pool import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.mark.parametrize("name", BAD_CASES)
def test_a_gradient_that_is_nan_stops_all_ranks_and_is_named(
    name: str, ranks: Callable[[int], Ranks]
) -> None:
    check_stop(name, ranks, accelerator="gpu")


@pytest.mark.parametrize("name", BAD_CASES)
def test_a_gradient_that_is_nan_is_skipped_by_all_ranks(
    name: str, ranks: Callable[[int], Ranks]
) -> None:
    check_skip(name, ranks, accelerator="gpu")


@pytest.mark.parametrize(("rank", "overlap", "clip"), SPOILED)
def test_an_overflow_of_one_rank_skips_the_step_on_all(
    rank: tuple[int, int], overlap: str, clip: float | None, ranks: Callable[[int], Ranks]
) -> None:
    check_spoiled(rank, overlap, clip, ranks, accelerator="gpu")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_run_resumes_at_its_layout_and_at_another(
    precision: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    check_resume(precision, ranks, tmp_path, accelerator="gpu")
