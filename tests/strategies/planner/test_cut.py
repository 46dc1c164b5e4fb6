"""Cuts against every possible cut, and the figures that half-blocks are there for."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.workloads.transformer_shape import TransformerShape, unit_specs
from strategies.errors import PlanError
from strategies.ir.program import loop, v
from strategies.planner.cut import MemoryLimit, balance, balance_ranks, by_counts, cut_chain


def all_cuts(count: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in pairwise((0, *inner, count)))
        for inner in combinations(range(1, count), stages - 1)
    ]


def stage_sums(units: tuple[int, ...], values: list[float]) -> list[float]:
    return [sum(values[a:b]) for a, b in pairwise((0, *accumulate(units)))]


numbers = st.integers(1, 20).map(float)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=9), st.integers(1, 4))
def test_the_bottleneck_is_the_least_and_of_such_cuts_the_bytes_are(units, stages):
    stages = min(stages, len(units))
    times = [float(time) for time, _ in units]
    sent = [float(size) for _, size in units]
    found = cut_chain(times, stages, sent=sent)
    assert found is not None

    def figures(cut: tuple[int, ...]) -> tuple[float, float]:
        behind = list(accumulate(cut))[:-1]
        return max(stage_sums(cut, times)), sum(sent[end - 1] for end in behind)

    # Bytes are those that the DP has been given: a cut behind unit i sends sent[i].
    crossing = [0.0, *sent]
    best = min(
        (max(stage_sums(cut, times)), sum(crossing[e] for e in list(accumulate(cut))[:-1]))
        for cut in all_cuts(len(units), stages)
    )
    assert figures(found)[0] == best[0]
    assert sum(crossing[e] for e in list(accumulate(found))[:-1]) == best[1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(numbers, numbers, numbers), min_size=3, max_size=9),
    st.integers(2, 4),
    st.integers(20, 120),
)
def test_under_a_memory_limit_it_is_the_fastest_cut_that_fits(units, stages, limit):
    stages = min(stages, len(units))
    times, state, kept = (list(map(float, column)) for column in zip(*units, strict=True))
    held = tuple(float(stages - stage) for stage in range(stages))
    room = MemoryLimit(tuple(state), tuple(kept), held, (float(limit),) * len(held))
    fitting = [cut for cut in all_cuts(len(units), stages) if room.holds(cut)]
    found = cut_chain(times, stages, room=room)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert room.holds(found)
    assert max(stage_sums(found, times)) == min(max(stage_sums(c, times)) for c in fitting)


def test_empty_stages_are_allowed_where_they_are_asked_for():
    assert cut_chain([1, 1], 3) is None
    found = cut_chain([1, 1], 3, min_units=0)
    assert found is not None
    assert sum(found) == 2
    assert max(found) == 1


@pytest.mark.parametrize("place", [loop(2, 2), v(2, 2), loop(3, 2), v(2, 3), loop(2, 3)])
def test_ranks_with_several_stages_come_close_to_the_best_of_all_cuts(place):
    times = [0.5, *([1.0, 2.0] * 5), 4.0]
    owner = place.copies[0]

    def slowest(cut: tuple[int, ...]) -> float:
        loads = [0.0] * place.num_ranks
        for stage, value in enumerate(stage_sums(cut, times)):
            loads[owner[stage]] += value
        return max(loads)

    begin = cut_chain(times, place.num_stages)
    assert begin is not None
    found = balance_ranks(begin, times, owner)
    best = min(slowest(cut) for cut in all_cuts(len(times), place.num_stages))
    assert slowest(found) <= slowest(begin)
    assert slowest(found) <= 1.1 * best


def test_half_blocks_bring_a_large_vocabulary_within_ten_percent_of_the_ideal():
    shape = TransformerShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128_256, sequence=8192
    )
    times = [max(1.0, float(unit.forward_flops)) for unit in unit_specs(shape)]
    blocks = [times[0], *(a + b for a, b in zip(times[1:-1:2], times[2:-1:2], strict=True))]
    blocks.append(times[-1])
    ideal = sum(times) / 8
    halves, whole = cut_chain(times, 8), cut_chain(blocks, 8)
    assert halves is not None
    assert whole is not None
    assert max(stage_sums(halves, times)) <= 1.10 * ideal
    assert max(stage_sums(whole, blocks)) > 1.12 * ideal


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


def every_partition(count, num_stages):
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
    cuts = every_partition(len(costs), num_stages)
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
