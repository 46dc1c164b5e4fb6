from __future__ import annotations

import gc

import pytest
import torch

from strategies.profiling.layer_times import fit_error, fit_line, transient

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


CPU = torch.device("cpu")


def test_what_stays_and_what_was_there_for_a_while():
    data = torch.zeros(1000)

    def call():
        doubled = data * 2  # gone in the end
        return doubled + 1

    _, stayed, most = transient(CPU, call)
    assert stayed == 4000
    assert 8000 <= most < 8200  # and a scalar or two


def test_a_backward_gives_back_more_than_it_takes():
    weight = torch.zeros(100, 100, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    data = torch.zeros(50, 100)
    loss = torch.tanh(data @ weight).sum()
    _, stayed, most = transient(CPU, loss.backward)
    assert stayed <= 0
    # The gradients behind and before tanh, or of the product and the weight.
    assert 20_000 <= most <= 80_000


def test_garbage_of_an_earlier_call_is_not_taken_from_what_the_next_one_needs():
    class Knot:
        def __init__(self) -> None:
            self.itself, self.tensor = self, torch.ones(1 << 20)

    def call():
        gc.collect()
        return torch.ones(1 << 18)

    gc.disable()
    try:
        transient(CPU, Knot)  # only a collection frees what it has made
        assert transient(CPU, call)[1:] == (1 << 20, 1 << 20)
    finally:
        gc.enable()


def test_errors_go_through():
    def call():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        transient(CPU, call)
