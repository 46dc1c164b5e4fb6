import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts
from strategies.analysis.memory import peak_activations
from strategies.ir.program import Program, chain
from strategies.ir.verify import verify
from strategies.schedules import SCHEDULES, Durations, Shape
from strategies.schedules.search.weight_gaps import makespan
from tests.strategies.programs import lines
from tests.strategies.schedules.figures import figures, picture


def made_for(durations, pp, microbatches, waves=1):
    """The bare order, verified."""
    schedule = SCHEDULES["hanayo"]
    shape = Shape(pp, microbatches, 2 * waves, durations=durations)
    placement = schedule.place(shape)
    return verify(
        Program(
            "hanayo", placement, microbatches, schedule.order(shape), chain(placement.num_stages)
        )
    )


def test_one_wave_of_two_microbatches():
    assert picture("hanayo", 2, 2) == lines(
        """
        rank 0 | 0F0 0F1  .  3F0 3B0  -  3F1 3B1  -   .  0B0  -   .   .  0B1  -
        rank 1 |  .  1F0 2F0 1F1 2F1  .  2B0  -  1B0  -  2B1  -  1B1  -   .   .
        """
    )


# Bubble in F of orders of two waves, P-1 at the least.
TWO_WAVES = {
    (2, 4): 1.0,
    (2, 8): 1.0,
    (4, 8): 3.0,
    (4, 16): 3.5,
    (8, 16): 8.25,
    (8, 32): 8.25,
}


@pytest.mark.parametrize(
    ("pp", "microbatches"),
    [pytest.param(*key, marks=pytest.mark.full if key[0] == 8 else ()) for key in TWO_WAVES],
)
def test_two_waves_come_close_to_it(pp, microbatches):
    result = figures("hanayo", pp, microbatches, 4)
    bubble = result.makespan - 3 * microbatches
    assert pp - 1 - 1e-9 <= bubble <= TWO_WAVES[pp, microbatches] + 1e-9
    assert max(result.peak_activations) <= pp


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_its_bubble_is_smaller_than_that_of_1f1b(pp, waves):
    microbatches = 2 * pp
    one = figures("1f1b", pp, microbatches)
    found = figures("hanayo", pp, microbatches, 2 * waves)
    assert found.makespan < one.makespan
    assert max(found.peak_activations) <= max(one.peak_activations)


@pytest.mark.parametrize("backward", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("pp", [2, 4])
def test_other_shares_of_b_are_bound_by_the_longer_of_f_and_b(pp, backward):
    costs = UniformCosts(backward=backward)
    found = figures("hanayo", pp, 2 * pp, costs=costs, made_for=costs)
    bubble = found.makespan - 2 * pp * (1 + backward)
    assert bubble >= (pp - 1) * max(1, backward) - 1e-9
    assert bubble <= (pp - 1) * (1 + backward) + 1e-9
    assert max(found.peak_activations) <= pp


per_stage = st.lists(st.floats(0.2, 3.0), min_size=8, max_size=8).map(tuple)


@settings(max_examples=25)
@given(per_stage, per_stage, per_stage, st.floats(0, 1), st.integers(1, 9))
def test_made_for_uneven_costs_it_is_never_slower_nor_larger(first, second, third, latency, m):
    durations = Durations(first, second, third, latency)
    regular, tuned = made_for(None, 4, m), made_for(durations, 4, m)
    assert makespan(tuned, durations) <= makespan(regular, durations) * (1 + 1e-9)
    assert max(peak_activations(tuned)) <= 4


def test_made_for_uneven_costs_it_can_be_faster():
    slow_head = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.5)
    durations = Durations(slow_head, slow_head, slow_head)
    regular, tuned = made_for(None, 4, 12), made_for(durations, 4, 12)
    assert makespan(tuned, durations) < 0.99 * makespan(regular, durations)


def test_the_same_question_gets_the_same_answer():
    assert made_for(None, 4, 10, 2).ranks == made_for(None, 4, 10, 2).ranks
