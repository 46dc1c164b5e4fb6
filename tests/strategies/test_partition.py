from itertools import combinations

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
    """9 decides; 1 1 1 1 | 9 and 4 stages could be cut 1 | 1 | 1 1 | 9 in many orders."""
    cut = balance([1, 1, 1, 1, 1, 1, 9], 4)
    assert sizes(cut) == [2, 2, 2, 1]


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
        yield [range(low, high) for low, high in zip(edges, edges[1:], strict=False)]


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
    assert all(cut_part for cut_part in cut)
    assert value(costs, cut) == min(value(costs, other) for other in all_cuts(len(costs), num_stages))


def test_a_prefix_that_is_best_alone_is_not_always_part_of_the_most_even_cut():
    """Of 9 8 2 8 4 | 9, the first five cut into three: 9 | 10 | 12 or 9 | 8 | 14 and so on."""
    costs = PREFIX_COSTS
    cut = balance(costs, PREFIX_STAGES)
    assert value(costs, cut) == min(value(costs, other) for other in all_cuts(len(costs), PREFIX_STAGES))


def test_counts_by_hand_may_be_uneven_and_zero():
    assert by_counts([3, 0, 2], 5, 3) == (range(3), range(3, 3), range(3, 5))


@pytest.mark.parametrize("counts", [[2, 2], [2, 2, 2], [1, 1, 1, 2], [4, -1, 2], []])
def test_counts_that_do_not_add_up_are_refused(counts):
    with pytest.raises(PlanError) as error:
        by_counts(counts, 5, 3)
    assert str(error.value) == (
        f"units_per_stage={counts} has {len(counts)} stages and {sum(counts)} units; "
        "needed are 3 stages (pp * stages_per_rank) and 5 units."
    )
