import re

import pytest

from strategies.compiler import compile_compute
from strategies.plan import Plan
from tests.strategies.programs import texts
from tests.strategies.schedules.dual import PAIRED, torchs_lists


def test_four_ranks_and_eight_microbatches():
    outer, inner, *_ = texts(compile_compute(Plan("dualpipe", 4, 8)))
    assert outer == (
        "0F0 0F2 0F4 3F1 3I1 3W1 3F3 (0F6;3B3)OVERLAP_F_B (3F5;0B0)OVERLAP_F_B 3B5 "
        "(3F7;0B2)OVERLAP_F_B 3B7 0I4 0W4 0I6 0W6"
    )
    assert inner == (
        "1F0 2F1 1F2 2F3 1F4 2B1 (2F5;1B0)OVERLAP_F_B (1F6;2B3)OVERLAP_F_B "
        "(2F7;1B2)OVERLAP_F_B 2B5 1B4 2I7 1I6 2W7 1W6"
    )


@pytest.mark.parametrize(("pp", "microbatches"), PAIRED["dualpipe"].shapes)
def test_each_half_is_the_v_of_torch(pp, microbatches):
    """Stage s of the V is stage s here; its way out is the pipe that starts at the nearer end."""
    lists = torchs_lists(pp // 2, microbatches // 2)
    rows = texts(compile_compute(Plan("dualpipe", pp, microbatches)))
    for rank, row in enumerate(rows):
        distance = min(rank, pp - 1 - rank)

        def here(match, distance=distance, up=rank != distance):
            stage, kind, index = int(match[1]), match[2], int(match[3])
            return f"{stage}{kind}{2 * index + ((stage != distance) ^ up)}"

        expected = [re.sub(r"(\d+)([FBIW])(\d+)", here, text) for text in lists[distance]]
        assert row.split() == expected
