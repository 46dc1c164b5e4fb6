import pytest

from strategies import UniformCosts
from tests.strategies.programs import compute_texts, lines
from tests.strategies.schedules.figures import compiled, figures, picture, refused


def test_two_stages_per_rank():
    assert picture("interleaved_1f1b", 2, 4) == lines(
        """
        rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0  -  0F3 2B1  -  2F2 0B0  -
        rank 1 |  .  1F0 1F1 3F0 3B0  -  3F1 3B1  -  1F2 1B0  -  1F3 1B1

        rank 0 | 2F3 0B1  -   .  2B2  -   .  2B3  -  0B2  -  0B3  -
        rank 1 |  -  3F2 3B2  -  3F3 3B3  -  1B2  -  1B3  -   .   .
        """
    )


def test_a_last_group_that_is_not_full_keeps_the_order_of_a_full_one():
    assert picture("interleaved_1f1b", 2, 3, 2, 2) == lines(
        """
        rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0  -   .  2B1  -
        rank 1 |  .  1F0 1F1 3F0 3B0  -  3F1 3B1  -  1F2 1B0

        rank 0 | 2F2 0B0  -  0B1  -   .  2B2  -   .   .  0B2  -
        rank 1 |  -  1B1  -  3F2 3B2  -   .   .  1B2  -   .   .
        """
    )


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("pp", [2, 3, 4, 5, pytest.param(8, marks=pytest.mark.full)])
def test_no_number_of_microbatches_leaves_it_above_the_bound(pp, stages):
    # Eight ranks: around the ends of each group.
    counts = range(1, 3 * pp + 2) if pp < 8 else (1, 4, 7, 8, 9, 15, 16, 17, 24, 25)
    for microbatches in counts:
        for costs in (UniformCosts(), UniformCosts(forward=1, backward=2.2, backward_input=1.3)):
            found = figures("interleaved_1f1b", pp, microbatches, stages, costs=costs)
            assert found.bound_gap == pytest.approx(0, abs=1e-9)


def test_a_group_of_all_microbatches_runs_chunk_after_chunk():
    assert picture("interleaved_1f1b", 2, 4, 2, 4) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2  .  2B0  -  2F3 2B1  -
        rank 1 |  .  1F0 1F1 1F2 1F3 3F0 3B0  -  3F1 3B1  -  3F2 3B2

        rank 0 |  .  2B2  -   .  2B3  -  0B0  -  0B1  -  0B2  -  0B3  -
        rank 1 |  -  3F3 3B3  -  1B0  -  1B1  -  1B2  -  1B3  -   .   .
        """
    )


def test_three_stages_per_rank():
    assert compute_texts(compiled("interleaved_1f1b", 2, 2, 3)) == lines(
        """
        0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 3B0 3B1 1B0 1B1
        """
    )


@pytest.mark.parametrize("group", [4, 8, 16])
def test_a_larger_group_costs_memory_and_no_time(group):
    found = figures("interleaved_1f1b", 4, 16, 4, group)
    assert found.makespan == pytest.approx(50.25)
    assert found.peak_activations[0] == pytest.approx((3 * group + 2 * 3 + 1) / 4)


def test_with_fewer_microbatches_than_ranks_the_range_turns_around():
    assert figures("interleaved_1f1b", 4, 2, 2, 3).peak_activations[0] == 2
    assert "here 2 to 4" in refused("interleaved_1f1b", 4, 2, 2, 5)
