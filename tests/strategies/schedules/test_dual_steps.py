from collections import Counter

import pytest

from strategies.schedules.dual_steps import dual_steps


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_each_way_runs_all_microbatches_forward_and_back(num_ranks):
    for per_way in (2 * num_ranks, 2 * num_ranks + 1, 5 * num_ranks):
        for rank in range(num_ranks):
            steps = dual_steps(rank=rank, num_ranks=num_ranks, per_way=per_way)
            count = Counter(part for step in steps for part in step.split("&"))
            for way in "01":
                assert count["F" + way] == count["B" + way] + count["I" + way] == per_way
            assert count["W"] == count["I0"] + count["I1"] == 2 * num_ranks - 1 - rank


def test_the_rank_at_the_turn_does_not_fuse_its_first_backward():
    assert " ".join(dual_steps(rank=1, num_ranks=2, per_way=4)) == (
        "F0 F1 F0 F1 F0 B1 F1&B0 F0&B1 F1&B0 B1 B0 I1 I0 W W"
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_more_microbatches_only_lengthen_the_main_part(num_ranks):
    for rank in range(num_ranks):
        short = dual_steps(rank=rank, num_ranks=num_ranks, per_way=2 * num_ranks)
        longer = dual_steps(rank=rank, num_ranks=num_ranks, per_way=2 * num_ranks + 1)
        grown = Counter(longer) - Counter(short)
        assert grown == Counter(["F0&B1", "F1&B0"])
        assert len(longer) == len(short) + 2
