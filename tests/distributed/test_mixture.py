"""A model with experts trains as in a single process, its balance and z-losses included."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from launcher.workloads.transformer_shape import MoeShape
from strategies.plan import Recompute
from tests.distributed.test_expert_parallel import check_built_in
from tests.distributed.test_parity import NAMES, SHORT, _degrees, _microbatches, check
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape

pytestmark = pytest.mark.distributed

# Losses weigh enough to be missed; 12 choices of 8 experts leave some without a token.
MOE = MoeShape(experts=8, per_token=2, ffn=6, balance_loss=0.3, z_loss=0.1)
SPARSE = small_shape(moe=MOE)
SHARED = small_shape(
    tie_embeddings=True,
    moe=replace(MOE, shared=1, first_dense=1, every=2, scores="sigmoid", scale=2.5),
)
STEERED = small_shape(
    moe=replace(MOE, scores="sigmoid", steering=0.02, balance_loss=0.0, normalised=False)
)
QUICK = {
    "1f1b": Case("1f1b", pp=2, dp=2, shape=SHARED, clip=0.05),
    "zb_h1": Case("zb_h1", pp=2, shape=SPARSE, recompute=Recompute("full")),
    "foldx_fifo": Case("foldx_fifo", pp=2, shape=SPARSE, accumulation=2, overlap="zero1", dp=2),
    "dualpipe": Case("dualpipe", pp=2, shape=SHARED),
    "split": Case("interleaved_1f1b", pp=2, shape=SHARED, split_backward=True),
    "chimera": Case("chimera", pp=2, shape=STEERED, clip=0.05),
    "zb_v": Case("zb_v", pp=2, dp=2, shape=STEERED, accumulation=2, overlap="zero1"),
    "one rank": Case("zb_v", pp=1, shape=SHARED, recompute=Recompute("selective")),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=() if n in ("zb_v", "split", "one rank") else pytest.mark.full)
        for n, c in QUICK.items()
    ],
    ids=QUICK,
)
def test_experts_and_their_losses_keep_parity(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check(replace(case, steps=SHORT), ranks)


def _everywhere() -> dict[str, Case]:
    shapes = {"sparse": SPARSE, "shared": SHARED, "steered": STEERED}
    found = {}
    for (number, name), (kind, shape) in itertools.product(enumerate(NAMES), shapes.items()):
        for pp in _degrees(name)[1:]:
            policy = ("none", "full", "layer")[number % 3]
            case = Case(name, pp, shape=shape, recompute=Recompute(policy), clip=0.05)
            found[f"{name}-{kind}-pp{pp}-{policy}"] = replace(
                case, microbatches=_microbatches(name, pp, 4)
            )
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", _everywhere().values(), ids=_everywhere())
def test_experts_keep_parity_under_every_schedule(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    check(case, ranks)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", pp=1, dp=2, ep=2, shape=STEERED, overlap="zero1"),
        Case("1f1b", pp=1, tp=2, ep=2, shape=replace(STEERED, kv_heads=2), clip=0.05),
    ],
    ids=["replicas", "sharers"],
)
def test_biases_are_steered_by_the_load_of_all_ranks(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    check_built_in(replace(case, steps=SHORT), ranks)
