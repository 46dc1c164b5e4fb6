import pytest

from tests.strategies.programs import lines
from tests.strategies.schedules.figures import figures, picture


def test_four_ranks():
    assert picture("v_min", 4, 4) == lines(
        """
        rank 0 | 0F0 0F1  .   .   .   .   .  7F0 7I0 0F2 7W0  .   .  7F1 7I1 0I0 7W1 0W0
        rank 1 |  .  1F0 1F1  .   .   .  6F0  .   .  6I0 6W0  .  6F1 1F2 1I0 6I1 1W0 6W1
        rank 2 |  .   .  2F0 2F1  .  5F0  .   .   .   .  5I0 5F1 5W0 2I0 2F2 2W0 5I1 5F2
        rank 3 |  .   .   .  3F0 4F0 3F1 4F1  .   .   .   .  4I0 3I0 4W0 3W0 3F2 4F2 4I1

        rank 0 | 0F3 7F2 7I2 0I1 7W2 0W1  .  7F3 7I3 0I2 7W3 0W2  .   .   .  0I3 0W3
        rank 1 | 6F2 1F3 1I1 6I2 1W1 6W2 6F3  .  1I2 6I3 1W2 6W3  .   .  1I3 1W3  .
        rank 2 | 5W1 2I1 2F3 2W1 5I2 5F3 5W2 2I2 2W2  .  5I3 5W3  .  2I3 2W3  .   .
        rank 3 | 3I1 4W1 3W1 3F3 4F3 4I2 3I2 4W2 3W2  .   .  4I3 3I3 4W3 3W3  .   .
        """
    )


@pytest.mark.parametrize(("pp", "peak"), [(2, 2), (5, 3), (8, 4)])
def test_its_memory_falls_towards_a_third_of_1f1b(pp, peak):
    assert max(figures("v_min", pp, 2 * pp).peak_activations) == peak


def test_it_is_faster_than_1f1b_at_a_third_of_its_memory():
    assert figures("v_min", 8, 16).makespan == 59.5
    assert figures("1f1b", 8, 16).makespan == 69
