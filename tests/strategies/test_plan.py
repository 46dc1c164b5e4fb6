from __future__ import annotations

import pytest

from strategies.errors import PlanError
from strategies.plan import POLICIES, Plan, Recompute, num_buckets


def test_the_smallest_plan_is_one_rank_and_one_microbatch():
    assert Plan() == Plan("1f1b", 1, 1, None, None, "grad_reduce", None)
    assert Plan().stage_buckets(2) == (1, 1)


def test_an_unknown_overlap_names_those_there_are():
    with pytest.raises(PlanError) as error:
        Plan(overlap="sometimes")
    assert str(error.value) == (
        "overlap=sometimes is unknown. Try overlap=grad_reduce or overlap=none or overlap=zero1."
    )


@pytest.mark.parametrize(
    ("num_bytes", "bucket_mb", "expected"),
    [
        (0, 25, 1),
        (1, 25, 1),
        (25 * 2**20, 25, 1),
        (25 * 2**20 + 1, 25, 2),
        (100 * 2**20, 25, 4),
        (3 * 2**20, 0.5, 6),
    ],
)
def test_a_bucket_holds_at_most_its_size(num_bytes, bucket_mb, expected):
    assert num_buckets(num_bytes, bucket_mb) == expected


def test_nothing_is_recomputed_unless_it_is_asked_for():
    assert Recompute() == Recompute("none", 4, None)
    rewriting = [policy for policy in POLICIES if Recompute(policy).rewrites]
    inside = [policy for policy in POLICIES if Recompute(policy).inside]
    assert (rewriting, inside) == (["full", "mario", "optimal"], ["layer", "selective"])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"policy": "ful"}, "recompute=ful is unknown. Try recompute=none or recompute=full"),
        ({"policy": "mario", "passes": 5}, "there are 4, applied in order"),
        ({"policy": "full", "passes": 2}, "Try recompute=mario recompute.passes=2"),
        ({"policy": "full", "max_full_activations": 2.0}, "Try recompute=optimal recompute.max"),
        ({"policy": "optimal", "max_full_activations": 0.0}, "needs one full activation"),
        ({"policy": "optimal", "max_full_activations": float("nan")}, "needs one full activation"),
    ],
)
def test_what_a_policy_would_ignore_is_refused(asked, message):
    with pytest.raises(PlanError, match=message):
        Recompute(**asked)
