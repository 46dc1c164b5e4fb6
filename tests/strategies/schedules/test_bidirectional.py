from __future__ import annotations

from collections import Counter

import pytest

from strategies.errors import PlanError
from strategies.schedules.bidirectional import dualpipe_steps, mirrored, number_steps, require_even
from strategies.schedules.schedule import Shape


def words(row):
    return " ".join(map(str, row))


def test_each_way_counts_its_own_forwards_and_backwards():
    row = number_steps(
        ["F0", "F0", "F1", "B1", "F0&B0"],
        stages=(1, 2),
        microbatch=lambda way, index: 10 * way + index,
    )
    assert words(row) == "1F0 1F1 2F10 2B10 (1F2;1B0)OVERLAP_F_B"


def test_an_input_gradient_counts_as_backward_and_its_weight_gradient_waits_its_turn():
    row = number_steps(
        ["F0", "F1", "F1", "I1", "I0", "W", "B1", "W"],
        stages=(0, 3),
        microbatch=lambda way, index: index,
    )
    assert words(row) == "0F0 3F0 3F1 3I0 0I0 3W0 3B1 0W0"


def test_mirrored_ranks_do_the_same_in_opposite_pipes():
    rows = mirrored(4, lambda distance: ["F0", "F0", "F1"] if distance else ["F1", "F0"])
    assert [words(row) for row in rows] == [
        "3F1 0F0",
        "1F0 1F2 2F1",
        "1F1 1F3 2F0",
        "3F0 0F1",
    ]


@pytest.mark.parametrize(
    ("pp", "microbatches", "rounds", "fix"),
    [
        (1, 2, 0, "Try pp=2."),
        (5, 8, 0, "Try pp=4 or pp=6."),
        (5, 7, 0, "Try pp=4 num_microbatches=8 or pp=6 num_microbatches=8."),
        (5, 10, 2, "Try pp=4 or pp=6 num_microbatches=12."),
        (4, 9, 0, "Try num_microbatches=8 or num_microbatches=10."),
        (4, 1, 0, "Try num_microbatches=2."),
        (4, 9, 2, "Try num_microbatches=8 or num_microbatches=10."),
        (4, 7, 2, "Try num_microbatches=8."),
        (4, 2, 2, "Try num_microbatches=8."),
    ],
)
def test_what_does_not_pair_up_is_refused_with_the_nearest_that_does(pp, microbatches, rounds, fix):
    with pytest.raises(PlanError) as error:
        require_even(Shape(pp, microbatches, 2), "twofold", rounds=rounds)
    assert "twofold" in str(error.value)
    assert str(error.value).endswith(fix)


@pytest.mark.parametrize(("pp", "microbatches", "rounds"), [(2, 2, 0), (4, 8, 2), (6, 4, 0)])
def test_what_pairs_up_passes(pp, microbatches, rounds):
    require_even(Shape(pp, microbatches, 2), "twofold", rounds=rounds)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_each_way_runs_all_microbatches_forward_and_back(num_ranks):
    for per_way in (2 * num_ranks, 2 * num_ranks + 1, 5 * num_ranks):
        for rank in range(num_ranks):
            steps = dualpipe_steps(rank=rank, num_ranks=num_ranks, per_way=per_way)
            count = Counter(part for step in steps for part in step.split("&"))
            for way in "01":
                assert count["F" + way] == count["B" + way] + count["I" + way] == per_way
            assert count["W"] == count["I0"] + count["I1"] == 2 * num_ranks - 1 - rank


def test_the_rank_at_the_turn_does_not_fuse_its_first_backward():
    assert " ".join(dualpipe_steps(rank=1, num_ranks=2, per_way=4)) == (
        "F0 F1 F0 F1 F0 B1 F1&B0 F0&B1 F1&B0 B1 B0 I1 I0 W W"
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_more_microbatches_only_lengthen_the_main_part(num_ranks):
    for rank in range(num_ranks):
        short = dualpipe_steps(rank=rank, num_ranks=num_ranks, per_way=2 * num_ranks)
        longer = dualpipe_steps(rank=rank, num_ranks=num_ranks, per_way=2 * num_ranks + 1)
        grown = Counter(longer) - Counter(short)
        assert grown == Counter(["F0&B1", "F1&B0"])
        assert len(longer) == len(short) + 2
