"""Ranks that share a GPU give the numbers of plain torch in double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.distributed.test_parity import check
from tests.distributed.test_tensor_parallel import check as check_shared
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

SHAPE = small_shape(layers=2, hidden=16, heads=4, kv_heads=4, tie_embeddings=True)


@pytest.mark.parametrize(
    "case",
    [
        Case("zb_v", pp=2, accelerator="gpu"),
        Case("1f1b", pp=2, split_backward=True, accumulation=2, accelerator="gpu"),
        Case("foldx_aiao", pp=2, dp=2, overlap="zero1", clip=0.05, accelerator="gpu"),
        Case("1f1b", pp=2, tp=2, shape=SHAPE, clip=0.05, accelerator="gpu"),
        Case("1f1b", tp=2, shape=SHAPE, sequence_parallel=True, accelerator="gpu"),
    ],
    ids=["zb", "split", "zero1", "tp", "sequence"],
)
def test_ranks_that_share_a_gpu_equal_plain_torch(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    (check_shared if case.tp > 1 else check)(case, ranks)
