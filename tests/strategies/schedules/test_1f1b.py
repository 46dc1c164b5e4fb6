import pytest

from strategies import UniformCosts
from tests.strategies.programs import lines
from tests.strategies.schedules.figures import figures, picture


def test_the_papers_figure():
    assert picture("1f1b", 4, 4) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3  .   .   .   .   .   .  0B0  -   .  0B1  -   .  0B2  -   .  0B3  -
        rank 1 |  .  1F0 1F1 1F2  .   .   .   .  1B0  -  1F3 1B1  -   .  1B2  -   .  1B3  -   .   .
        rank 2 |  .   .  2F0 2F1  .   .  2B0  -  2F2 2B1  -  2F3 2B2  -   .  2B3  -   .   .   .   .
        rank 3 |  .   .   .  3F0 3B0  -  3F1 3B1  -  3F2 3B2  -  3F3 3B3  -   .   .   .   .   .   .
        """
    )


def test_fewer_microbatches_than_ranks():
    assert picture("1f1b", 4, 2) == lines(
        """
        rank 0 | 0F0 0F1  .   .   .   .   .   .   .   .  0B0  -   .  0B1  -
        rank 1 |  .  1F0 1F1  .   .   .   .   .  1B0  -   .  1B1  -   .   .
        rank 2 |  .   .  2F0 2F1  .   .  2B0  -   .  2B1  -   .   .   .   .
        rank 3 |  .   .   .  3F0 3B0  -  3F1 3B1  -   .   .   .   .   .   .
        """
    )


@pytest.mark.parametrize("microbatches", [8, 16])
def test_latency_puts_it_above_the_bound(microbatches):
    """Each forward-backward pair of a rank waits for the round trip to the next."""
    assert 0.07 < figures("1f1b", 4, microbatches, costs=UniformCosts(p2p=0.25)).bound_gap < 0.095
