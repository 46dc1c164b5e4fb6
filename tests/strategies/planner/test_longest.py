import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.planner.longest import longest


@given(st.integers(-5, 300), st.integers(1, 250), st.integers(1, 9))
def test_it_is_the_largest_number_of_the_grid_that_fits(limit, start, step):
    found = longest(lambda n: n <= limit, start=start, step=step, least=1, most=250)
    grid = [n for n in range(1, 251) if (n - start) % step == 0 and n <= limit]
    assert found == max(grid, default=None)


@pytest.mark.parametrize(("start", "most_trials"), [(1000, 2), (900, 14), (4, 22)])
def test_a_good_guess_takes_few_trials(start, most_trials):
    tried = []

    def fits(number):
        tried.append(number)
        return number <= 1000

    assert longest(fits, start=start, step=1, least=1, most=10**6) == 1000
    assert len(tried) <= most_trials
