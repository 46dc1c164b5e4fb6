import pytest

from strategies.errors import PlanError
from strategies.recompute import POLICIES, Recompute


def test_nothing_is_recomputed_unless_it_is_asked_for():
    assert Recompute() == Recompute("none", 4, None)
    assert [Recompute(policy).rewrites for policy in POLICIES] == [False, True, False, True, True]


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
