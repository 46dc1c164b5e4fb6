"""Every layout of pipeline, replicas and shared matrices trains like one process, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.distributed import test_parity, test_tensor_parallel
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape

pytestmark = pytest.mark.distributed

LAYOUTS = [(1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1), (1, 4, 1)]
TIED = small_shape(kv_heads=2, tie_embeddings=True)
UNTIED = small_shape(kv_heads=2)


def _case(layout: tuple[int, int, int], overlap: str, tied: bool) -> Case:
    pp, dp, tp = layout
    return Case(
        pp=pp, dp=dp, tp=tp, overlap=overlap, rows=8 // dp, microbatches=2, clip=0.05,
        shape=TIED if tied else UNTIED,
    )  # fmt: skip


ALL = [
    _case(layout, overlap, tied)
    for layout, overlap, tied in itertools.product(LAYOUTS, ("grad_reduce", "zero1"), (True, False))
]
# What no other file runs every day.
QUICK = [
    _case((2, 2, 1), "zero1", True),
]


def _name(case: Case) -> str:
    tied = "tied" if case.shape.tie_embeddings else "untied"
    return f"pp{case.pp}-dp{case.dp}-tp{case.tp}-{case.overlap}-{tied}"


def check(case: Case, ranks: Callable[[int], Ranks]) -> None:
    assert case.steps == 10
    module = test_tensor_parallel if case.tp > 1 else test_parity
    assert module.TOLERANCE == 1e-10
    module.check(case, ranks)


@pytest.mark.parametrize("case", QUICK, ids=_name)
def test_a_layout_trains_like_one_process(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check(case, ranks)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in ALL if case not in QUICK], ids=_name)
def test_every_layout_trains_like_one_process(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check(case, ranks)
