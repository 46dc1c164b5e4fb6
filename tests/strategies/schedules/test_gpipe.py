from tests.strategies.programs import lines
from tests.strategies.schedules.figures import picture


def test_all_forwards_stand_before_all_backwards():
    assert picture("gpipe", 2, 3) == lines(
        """
        rank 0 | 0F0 0F1 0F2  .   .   .  0B0  -  0B1  -  0B2  -
        rank 1 |  .  1F0 1F1 1F2 1B0  -  1B1  -  1B2  -   .   .
        """
    )


def test_fewer_microbatches_than_ranks():
    assert picture("gpipe", 4, 2) == lines(
        """
        rank 0 | 0F0 0F1  .   .   .   .   .   .   .   .   .  0B0  -  0B1  -
        rank 1 |  .  1F0 1F1  .   .   .   .   .   .  1B0  -  1B1  -   .   .
        rank 2 |  .   .  2F0 2F1  .   .   .  2B0  -  2B1  -   .   .   .   .
        rank 3 |  .   .   .  3F0 3F1 3B0  -  3B1  -   .   .   .   .   .   .
        """
    )
