from tests.strategies.programs import lines
from tests.strategies.schedules.figures import picture


def test_two_ranks_take_turns():
    assert picture("naive", 2, 2) == lines(
        """
        rank 0 | 0F0  .   .   .  0B0  -  0F1  .   .   .  0B1  -
        rank 1 |  .  1F0 1B0  -   .   .   .  1F1 1B1  -   .   .
        """
    )


def test_three_ranks_take_turns():
    assert picture("naive", 3, 2) == lines(
        """
        rank 0 | 0F0  .   .   .   .   .   .  0B0  -  0F1  .   .   .   .   .   .  0B1  -
        rank 1 |  .  1F0  .   .   .  1B0  -   .   .   .  1F1  .   .   .  1B1  -   .   .
        rank 2 |  .   .  2F0 2B0  -   .   .   .   .   .   .  2F1 2B1  -   .   .   .   .
        """
    )


def test_virtual_stages_are_crossed_in_order():
    assert picture("naive", 2, 1, 2) == lines(
        """
        rank 0 | 0F0  .  2F0  .   .   .  2B0  -   .   .  0B0  -
        rank 1 |  .  1F0  .  3F0 3B0  -   .   .  1B0  -   .   .
        """
    )
