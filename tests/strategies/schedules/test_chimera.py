import pytest

from strategies import UniformCosts
from tests.strategies.programs import compute_texts, lines
from tests.strategies.schedules.figures import compiled, figures, picture


def test_the_papers_figure():
    assert picture("chimera", 4, 4) == lines(
        """
        rank 0 | 0F0 0F2  .  3F1 3B1  -  3F3 3B3  -   .  0B0  -   .   .  0B2  -
        rank 1 |  .  1F0 2F1 1F2 2F3  .  2B1  -  1B0  -  2B3  -  1B2  -   .   .
        rank 2 |  .  1F1 2F0 1F3 2F2  .  2B0  -  1B1  -  2B2  -  1B3  -   .   .
        rank 3 | 0F1 0F3  .  3F0 3B0  -  3F2 3B2  -   .  0B1  -   .   .  0B3  -
        """
    )


def test_more_microbatches_continue_the_pattern():
    assert picture("chimera", 4, 8) == lines(
        """
        rank 0 | 0F0 0F2 0F4 3F1 3B1  -  3F3 3B3  -  0F6  .  0B0  -  3F5
        rank 1 |  .  1F0 2F1 1F2 2F3  .  2B1  -  1F4 1B0  -  2F5 2B3  -
        rank 2 |  .  1F1 2F0 1F3 2F2  .  2B0  -  1F5 1B1  -  2F4 2B2  -
        rank 3 | 0F1 0F3 0F5 3F0 3B0  -  3F2 3B2  -  0F7  .  0B1  -  3F4

        rank 0 | 3B5  -   .  0B2  -  3F7 3B7  -  0B4  -   .   .  0B6  -
        rank 1 | 1F6 1B2  -  2F7 2B5  -  1B4  -  2B7  -  1B6  -   .   .
        rank 2 | 1F7 1B3  -  2F6 2B4  -  1B5  -  2B6  -  1B7  -   .   .
        rank 3 | 3B4  -   .  0B3  -  3F6 3B6  -  0B5  -   .   .  0B7  -
        """
    )


def test_two_ranks_alternate_without_a_bubble():
    assert compute_texts(compiled("chimera", 2, 4)) == [
        "0F0 1F1 1B1 0F2 0B0 1F3 1B3 0B2",
        "0F1 1F0 1B0 0F3 0B1 1F2 1B2 0B3",
    ]
    assert figures("chimera", 2, 4).bubble_ratio == 0


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_up_to_p_microbatches_each_pipe_is_1f1b(pp):
    for num_microbatches in range(2, pp + 1, 2):
        half = compiled("1f1b", pp, num_microbatches // 2)
        rows = compute_texts(compiled("chimera", pp, num_microbatches))
        for rank, row in enumerate(rows):
            for way, stage in ((0, rank), (1, pp - 1 - rank)):
                names = [word for word in row.split() if int(word[2:]) % 2 == way]
                renumbered = [f"{name[:2]}{int(name[2:]) // 2}" for name in names]
                assert renumbered == compute_texts(half)[stage].split()


@pytest.mark.parametrize("backward", [0.5, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_the_bubble_is_that_of_the_middle_whatever_the_number_of_microbatches(pp, backward):
    for microbatches in (pp, pp + 2, 2 * pp, 2 * pp + 2, 4 * pp):
        expected = microbatches * (1 + backward) + (pp - 2) * max(1, backward)
        found = figures("chimera", pp, microbatches, costs=UniformCosts(backward=backward))
        assert found.makespan == pytest.approx(expected)


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(("pp", "microbatches"), [(4, 2), (6, 2), (6, 4), (8, 2), (8, 4), (8, 6)])
def test_fewer_microbatches_than_ranks(pp, microbatches, backward):
    expected = pp + (microbatches + pp - 2) * backward
    found = figures("chimera", pp, microbatches, costs=UniformCosts(backward=backward))
    assert found.makespan == pytest.approx(expected)


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_no_rank_holds_more_than_p_activations(pp):
    for microbatches in (2 * pp - 2, 2 * pp, 4 * pp):
        assert figures("chimera", pp, microbatches).peak_activations == (pp,) * pp
    unit = tuple(pp // 2 + min(rank, pp - 1 - rank) + 1 for rank in range(pp))
    assert figures("chimera", pp, pp).peak_activations == unit


@pytest.mark.parametrize("pp", [4, 6, 8])
def test_its_unit_sits_on_the_bound(pp):
    assert figures("chimera", pp, pp).bound_gap == pytest.approx(0)
