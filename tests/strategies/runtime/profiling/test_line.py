import pytest

from strategies.runtime.profiling.line import fit_error, fit_line

COUNTS = [[1, 0], [0, 1], [1, 1], [2, 2]]


def test_what_stages_take_by_themselves_is_told_from_what_units_add():
    fixed, each = fit_line(COUNTS, [3.5, 5.5, 8.5, 16.5])
    assert fixed == pytest.approx(0.5)
    assert each == pytest.approx((3, 5))


def test_nothing_is_negative():
    # More than the sum of its parts: a straight line would begin below 0.
    fixed, each = fit_line(COUNTS, [3, 5, 9, 18])
    assert fixed == 0
    assert min(each) > 0
    fixed, each = fit_line([[1, 0], [1, 1], [2, 1], [2, 2]], [2.0, 1.9, 3.9, 3.8])
    assert min(fixed, *each) >= 0


def test_short_stages_count_as_much_as_long_ones():
    """An error of 10 % in the longest stage moves no figure by more than that."""
    fixed, each = fit_line(COUNTS, [3, 5, 8, 16 * 1.1])
    assert each == pytest.approx((3, 5), rel=0.1)
    assert fixed == 0


def test_too_few_stages_leave_nothing_fixed():
    assert fit_line([[1, 0], [0, 1]], [3, 5]) == (0.0, pytest.approx((3, 5)))


def test_units_that_take_nothing():
    assert fit_line([[1], [2]], [0, 0]) == (0.0, (0.0,))


def test_the_error_of_a_line_is_what_it_misses_of_all_that_was_measured():
    counts, measured = [[1], [2], [4]], [1.0, 2.0, 5.0]
    assert fit_error(counts, [(measured, (0.0, (1.0,)))]) == pytest.approx(1 / 8)
    both = [(measured, (0.0, (1.0,))), ([2.0, 4.0, 8.0], (0.0, (2.0,)))]
    assert fit_error(counts, both) == pytest.approx(1 / 22)
    assert fit_error(counts, [([0.0, 0.0, 0.0], (0.0, (0.0,)))]) is None
