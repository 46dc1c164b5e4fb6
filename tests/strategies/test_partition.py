from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.errors import PlanError
from strategies.partition import balance, by_counts


def sizes(cut):
    return [len(part) for part in cut]


def test_equal_units_are_shared_out_evenly():
    assert sizes(balance([1] * 8, 4)) == [2, 2, 2, 2]
    assert sizes(balance([1] * 10, 4)).count(3) == 2


def test_a_costly_unit_gets_a_stage_of_its_own():
    assert balance([1, 1, 9, 1, 1], 3) == (range(2), range(2, 3), range(3, 5))


def test_of_equally_fast_cuts_the_most_even_one_is_taken():
    """The 9 decides how fast the cut is; 4 1 1 before it would be as good for that."""
    assert sizes(balance([1, 1, 1, 1, 1, 1, 9], 4)) == [2, 2, 2, 1]


def test_one_stage_takes_all():
    assert balance([3, 0, 2], 1) == (range(3),)


def test_units_without_cost_still_fill_stages():
    assert balance([0, 0, 0], 3) == (range(1), range(1, 2), range(2, 3))


def test_fewer_units_than_stages_is_refused():
    with pytest.raises(PlanError) as error:
        balance([1, 1, 1], 4)
    assert str(error.value) == (
        "4 stages (pp * schedule.stages_per_rank) for a model of 3 units: a stage needs at least "
        "one unit. Try pp * schedule.stages_per_rank <= 3, or a deeper model."
    )


def all_cuts(count, num_stages):
    for inner in combinations(range(1, count), num_stages - 1):
        edges = (0, *inner, count)
        yield [range(low, high) for low, high in pairwise(edges)]


def value(costs, cut):
    totals = [sum(costs[unit] for unit in part) for part in cut]
    return max(totals), sum(total**2 for total in totals)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )
)
def test_no_other_cut_is_better(case):
    costs, num_stages = case
    cut = balance(costs, num_stages)
    assert [unit for part in cut for unit in part] == list(range(len(costs)))
    assert len(cut) == num_stages
    assert all(cut)
    cuts = all_cuts(len(costs), num_stages)
    assert value(costs, cut) == min(value(costs, other) for other in cuts)


def test_a_prefix_that_is_fastest_alone_need_not_be_part_of_the_most_even_cut():
    """The last stage takes 95, so the units before it may be cut a little slower, more evenly."""
    costs = [5, 27, 42, 29, 20, 48, 50, 28, 29, 26, 40]
    assert sizes(balance(costs, 5)) == [3, 2, 1, 2, 3]
    assert sizes(balance(costs[:6], 3)) == [2, 2, 2]


def test_counts_by_hand_may_be_uneven_and_zero():
    assert by_counts([3, 0, 2], 5, 3) == (range(3), range(3, 3), range(3, 5))


@pytest.mark.parametrize("counts", [[2, 2], [2, 2, 2], [1, 1, 1, 2], [4, -1, 2], []])
def test_counts_that_do_not_add_up_are_refused(counts):
    with pytest.raises(PlanError) as error:
        by_counts(counts, 5, 3)
    assert str(error.value) == (
        f"units_per_stage={counts} has {len(counts)} stages and {sum(counts)} units; "
        "needed are 3 stages (pp * stages_per_rank) and 5 units. Leave it out to balance by cost."
    )
