"""Losses of a step with manual optimization: means over rows, or refused with their line."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from strategies.errors import ModelError
from strategies.models.manual.row_check import compare_losses

ROWS = (3, 1)


def compare(
    whole: Sequence[float], *parts: Sequence[float], mixed: str | None = None
) -> tuple[str, ...]:
    """The check of a step with these losses: of the whole batch, and of its parts of 3 and 1."""

    def run(batch: Sequence[float], share: Any, both: Any) -> Any:
        losses = [(f"line {number}", loss) for number, loss in enumerate(batch)]
        return SimpleNamespace(
            losses=losses,
            logged=(),
            mixed=mixed if share.start else None,
            share=share,
            failed=None,
            drawn=None,
        )

    return compare_losses(run, whole, parts, ROWS, step="training_step")


def test_means_over_rows_pass_each_part_with_the_weight_of_its_rows():
    assert compare([2.5, 0.0], [2.0, 0.0], [4.0, 0.0]) == ()
    assert compare([2.5 + 1e-6], [2.0], [4.0]) == ()


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        ([3.0], ([2.0], [4.0])),  # the mean over parts
        ([10.0], ([6.0], [4.0])),  # a sum
        ([2.501], ([2.0], [4.0])),
        ([1e-3], ([2e-3], [2e-3])),
    ],
)
def test_what_is_no_mean_is_refused_with_its_line_and_both_numbers(whole, parts):
    mean = (parts[0][0] * 3 + parts[1][0]) / 4
    with pytest.raises(ModelError) as refused:
        compare([0.0, *whole], *([0.0, *part] for part in parts))
    assert str(refused.value).startswith("line 1: this loss of training_step is no mean over rows")
    assert f"it is {whole[0]:.6g} for 4 rows and {mean:.6g} as the mean" in str(refused.value)


def test_a_loss_that_is_no_number_says_nothing():
    assert compare([float("nan")], [1.0], [2.0]) == ()


def test_a_step_with_fewer_backwards_for_a_part_says_nothing():
    assert compare([1.0, 5.0], [1.0, 1.0], [1.0]) == ()
    with pytest.raises(ModelError, match="line 0"):
        compare([9.0, 5.0], [1.0, 1.0], [1.0])


def test_layers_that_get_rows_mixed_are_refused_first():
    with pytest.raises(ModelError, match=r"^layer two: training_step mixes rows of the batch"):
        compare([9.0], [1.0], [1.0], mixed="layer two")
