import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts
from tests.strategies.programs import lines
from tests.strategies.schedules.figures import figures, picture


def test_three_ranks_run_five_three_and_one_forwards_first():
    assert picture("eager_1f1b", 3, 5) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3 0F4  .   .  0B0  -   .  0B1  -   .  0B2  -   .  0B3  -   .  0B4  -
        rank 1 |  .  1F0 1F1 1F2  .  1B0  -  1F3 1B1  -  1F4 1B2  -   .  1B3  -   .  1B4  -   .   .
        rank 2 |  .   .  2F0 2B0  -  2F1 2B1  -  2F2 2B2  -  2F3 2B3  -  2F4 2B4  -   .   .   .   .
        """
    )


@pytest.mark.parametrize("p2p", [0.25, 0.5, 1.0, 1.5])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_a_latency_of_up_to_half_of_f_and_b_is_hidden(pp, microbatches, p2p):
    result = figures("eager_1f1b", pp, microbatches, costs=UniformCosts(p2p=p2p))
    assert result.bound_gap == pytest.approx(0, abs=1e-9)
    assert result.makespan == pytest.approx(3 * microbatches + (pp - 1) * (3 + 2 * p2p))


def test_a_longer_latency_is_not():
    assert figures("eager_1f1b", 4, 8, costs=UniformCosts(p2p=2.0)).bound_gap > 0.06


@settings(max_examples=25)
@given(pp=st.integers(1, 8), microbatches=st.integers(1, 16), p2p=st.floats(0, 2))
def test_it_is_never_slower_than_1f1b_and_holds_less_than_twice_as_much(pp, microbatches, p2p):
    costs = UniformCosts(p2p=p2p)
    plain = figures("1f1b", pp, microbatches, costs=costs)
    eager = figures("eager_1f1b", pp, microbatches, costs=costs)
    assert max(eager.peak_activations) <= max(1, 2 * max(plain.peak_activations) - 1)
    assert eager.makespan <= plain.makespan + 1e-9
