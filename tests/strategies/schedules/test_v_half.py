import pytest

from strategies.ir.program import v
from strategies.schedules.v_half import _regular
from tests.strategies.programs import lines
from tests.strategies.schedules.figures import figures, picture
from tests.strategies.schedules.timed_orders import figures_of, rows_of, timed, uniform


def test_four_ranks():
    assert picture("v_half", 4, 4) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3  .   .   .  7F0 7I0 7F1 7I1 7W0 7W1 7F2 7I2
        rank 1 |  .  1F0 1F1 1F2 1F3  .  6F0  .  6F1 6I0 6W0 6I1 6F2 6W1  .
        rank 2 |  .   .  2F0 2F1 2F2 5F0  .  5F1  .   .  5I0 5F2 5W0 2F3 2I0
        rank 3 |  .   .   .  3F0 4F0 3F1 4F1 3F2 4F2  .   .  4I0 3I0 4W0 3F3

        rank 0 | 7W2 0I0 0W0  .  7F3 7I3 0I1 0W1 0I2 7W3 0W2  .  0I3 0W3
        rank 1 | 1I0 6I2 1W0 6F3 6W2 1I1 6I3 1I2 1W1 6W3 1W2 1I3 1W3  .
        rank 2 | 5I1 2W0 5F3 5I2 2I1 5W1 2I2 5I3 2W1 5W2 2I3 2W2 5W3 2W3
        rank 3 | 3W0 4F3 4I1 3I1 4I2 3I2 4W1 3W1 4I3 3I3 4W2 3W2 4W3 3W3
        """
    )


@pytest.mark.parametrize(("pp", "share"), [(2, 1.0), (4, 0.75), (6, 2 / 3), (8, 0.625)])
def test_its_memory_falls_towards_half_of_1f1b(pp, share):
    reference = figures("1f1b", pp, 2 * pp).peak_activations
    assert max(figures("v_half", pp, 2 * pp).peak_activations) == share * max(reference)


@pytest.mark.parametrize("costs", [(2.0, 0.5, 0.5), (0.5, 2.0, 0.5)])
def test_costs_that_break_the_blocks_condition_get_an_order_of_their_own(costs):
    """W+2I < 2F or W+2F < 2I: the regular order would wait in every period."""
    placement = v(8)
    durations = uniform(placement, *costs)
    regular, _ = figures_of(placement, 24, _regular(8, 24), durations)
    order = timed(placement, 24, rows_of("v_half", 8, 24, durations), durations)
    assert order.figures.makespan < 0.95 * regular
    assert order.peak <= 5
