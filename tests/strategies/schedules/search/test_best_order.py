"""Orders for given costs: the five schedules that generate one wherever theirs is not the best."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import measure
from strategies.ir.program import bidirectional, loop, v
from strategies.schedules import v_half, v_min, zb_h1, zb_h2, zb_v
from strategies.schedules.schedule import Durations
from strategies.schedules.search.best_order import (
    NEVER,
    Block,
    best_order,
    blocks,
    by_makespan,
    by_period,
    equal_durations,
    generated_order,
    repeat,
)
from strategies.schedules.search.lanes import lanes_of
from tests.strategies.schedules.timed_orders import (
    figures_of,
    placement_of,
    rows_of,
    timed,
    uneven_durations,
    uniform,
)

MODULES = {"zb_h1": zb_h1, "zb_h2": zb_h2, "zb_v": zb_v, "v_half": v_half, "v_min": v_min}
CAPS = {
    "zb_h1": lambda p: p,
    "zb_h2": lambda p: 2 * p - 1,
    "zb_v": lambda p: p,
    "v_half": lambda p: (p + 2) // 2,
    "v_min": lambda p: (p + 4) // 3,
}
BY_PERIOD = ("zb_h2", "zb_v")


def goal_of(name, figures):
    makespan, period = figures
    return period if name in BY_PERIOD else makespan


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), pp=st.integers(1, 8), microbatches=st.integers(1, 16))
def test_an_order_for_uneven_costs_keeps_the_memory_and_is_never_worse_than_the_regular_one(
    name, data, pp, microbatches
):
    placement = placement_of(name, pp)
    durations = data.draw(uneven_durations(placement.num_stages))
    order = timed(placement, microbatches, rows_of(name, pp, microbatches, durations), durations)
    regular = figures_of(
        placement, microbatches, MODULES[name]._regular(pp, microbatches), durations
    )
    figures = (order.figures.makespan, order.span)
    assert order.peak <= CAPS[name](pp)
    assert goal_of(name, figures) <= goal_of(name, regular) * (1 + 1e-6)
    assert order.figures.makespan >= order.figures.lower_bound * (1 - 1e-9)


UNEVEN_4 = (0.8, 1.0, 1.2, 1.0)
UNEVEN_8 = (1.3, 1.0, 0.9, 1.1, 1.0, 0.9, 1.3, 0.8)


@pytest.mark.parametrize(
    ("name", "scale", "ratios", "gain"),
    [
        ("zb_h1", UNEVEN_4, (1.0, 1.3, 0.6), 0.045),
        ("zb_h2", (0.8, 1.0, 1.3, 0.8), (1.0, 1.4, 0.5), 0.04),
        ("zb_v", UNEVEN_8, (1.0, 0.9, 0.9), 0.04),
        ("v_half", UNEVEN_8, (1.0, 1.3, 0.6), 0.025),
        ("v_min", UNEVEN_8, (1.0, 1.3, 0.6), 0.075),
    ],
)
def test_uneven_stages_are_worth_an_order_of_their_own(name, scale, ratios, gain):
    placement = placement_of(name, 4)
    durations = Durations(*(tuple(ratio * part for part in scale) for ratio in ratios))
    regular = figures_of(placement, 8, MODULES[name]._regular(4, 8), durations)
    made = figures_of(placement, 8, rows_of(name, 4, 8, durations), durations)
    assert goal_of(name, made) < (1 - gain) * goal_of(name, regular)


@pytest.mark.parametrize(
    ("name", "costs", "regular", "made"),
    [
        ("zb_v", (1.0, 1.5, 0.6), 105.5, 105.2),
        ("v_half", (1.0, 1.2, 0.8), 116.7, 107.4),
        ("v_half", (1.0, 1.5, 0.6), 136.45, 114.5),
        ("v_min", (1.0, 1.2, 0.8), 127.2, 124.4),
        ("v_min", (1.0, 1.5, 0.6), 156.8, 143.7),
    ],
)
def test_what_unequal_parts_of_a_microbatch_are_worth(name, costs, regular, made):
    """P=8, M=32; an order found later may be better still."""
    placement = placement_of(name, 8)
    durations = uniform(placement, *costs)
    before = figures_of(placement, 32, MODULES[name]._regular(8, 32), durations)
    after = figures_of(placement, 32, rows_of(name, 8, 32, durations), durations)
    assert goal_of(name, before) == pytest.approx(regular)
    assert goal_of(name, after) <= made + 1e-9


@pytest.mark.parametrize("name", MODULES)
def test_the_same_costs_in_another_unit_give_the_same_order(name):
    placement = placement_of(name, 4)
    seconds = uniform(placement, 1.0 / 1024, 1.5 / 1024, 0.5 / 1024, latency=0.0625 / 1024)
    units = uniform(placement, 1.0, 1.5, 0.5, latency=0.0625)
    assert rows_of(name, 4, 9, seconds) == rows_of(name, 4, 9, units)


@pytest.mark.parametrize("name", MODULES)
def test_equal_costs_in_any_unit_give_the_regular_order(name):
    placement = placement_of(name, 4)
    rows = rows_of(name, 4, 8, None)
    assert rows == MODULES[name]._regular(4, 8)
    assert rows == rows_of(name, 4, 8, uniform(placement, 0.003, 0.003, 0.003))


@pytest.mark.parametrize("name", MODULES)
def test_the_compiler_hands_the_runs_costs_to_the_schedule(name):
    costs = UniformCosts(forward=1.0, backward=2.1, backward_input=1.5, p2p=0.1)
    program = compile_program(schedule=name, pp=8, num_microbatches=16, costs=costs, buckets=0)
    placement = placement_of(name, 8)
    durations = uniform(placement, 1.0, 1.5, 0.6, latency=0.1)
    figures = measure(simulate(program, costs), costs)
    made = figures_of(placement, 16, rows_of(name, 8, 16, durations), durations)
    assert (figures.makespan, figures.period) == pytest.approx(made)


def test_the_regular_order_wins_a_tie():
    """Zero bubble at equal costs: nothing can be better, many are as good."""
    placement = loop(4, 1)
    rows = best_order(
        placement,
        8,
        equal_durations(placement),
        caps=(7,) * 4,
        regular=zb_h2._regular,
        recipes=blocks([(3.0, 3.0)], turns=[0.0], spares=[0], patiences=[0.0]),
        goal=by_period,
    )
    assert rows == zb_h2._regular(4, 8)


def test_period_and_makespan_lead_to_different_orders():
    placement = v(4)
    durations = uniform(placement, 1.0, 0.9, 0.9)
    made = {
        goal: generated_order(
            placement,
            8,
            durations,
            caps=(8,) * 4,
            recipes=blocks(
                [(4.0, 2.0, 4.0, 2.0), (2.0, 1.0, 2.0, 1.0)],
                turns=range(6),
                spares=[0, 2, NEVER],
                patiences=[0.0, 0.5],
            ),
            goal=goal,
        )
        for goal in (by_makespan, by_period)
    }
    fast, dense = (figures_of(placement, 8, made[goal], durations) for goal in made)
    assert fast[0] < dense[0]
    assert dense[1] < fast[1]


def test_a_search_over_many_microbatches_tries_all_recipes_on_few_of_them():
    """256 microbatches on 8 ranks: the winner is as good as at 24, where all were tried."""
    placement = v(8)
    durations = uniform(placement, 1.0, 1.5, 0.6)
    short = figures_of(placement, 24, rows_of("v_half", 8, 24, durations), durations)
    long = figures_of(placement, 256, rows_of("v_half", 8, 256, durations), durations)
    work = 1.0 + 1.5 + 0.6
    assert long[0] - 256 * work <= 1.05 * (short[0] - 24 * work)


def first(times):
    """Of microbatch 0, per stage."""
    return [lane[0] for lane in times]


def test_the_block_of_v_min_goes_one_slot_per_rank():
    placement = v(3)
    guide = repeat(Block((1, 1, 1, 1)), lanes_of(placement, 2), equal_durations(placement))
    assert first(guide.forward) == [0, 1, 2, 3, 4, 5]
    assert first(guide.backward) == [11, 10, 9, 8, 7, 6]


def test_the_block_of_v_half_goes_down_at_two_slots_and_up_at_one():
    placement = v(3)
    guide = repeat(Block((2, 1, 2, 1)), lanes_of(placement, 2), equal_durations(placement))
    assert first(guide.forward) == [0, 2, 4, 5, 6, 7]
    assert first(guide.backward) == [15, 14, 13, 12, 10, 8]


def test_a_turn_delays_the_first_backward():
    placement = v(2)
    guide = repeat(Block((1, 1, 1, 1), turn=3), lanes_of(placement, 1), equal_durations(placement))
    assert first(guide.backward) == [10, 9, 8, 7]


def test_microbatches_follow_at_the_work_of_the_slowest_rank():
    placement = loop(2, 1)
    durations = Durations((1.0, 2.0), (1.0, 3.0), (1.0, 1.0))
    guide = repeat(Block((1.5, 1.5)), lanes_of(placement, 3), durations)
    assert guide.forward == ((0, 6, 12), (3, 9, 15))  # 1.5 slots of 2
    assert guide.backward[1] == (5, 11, 17)


def test_a_hop_never_takes_less_than_what_is_run_and_sent():
    placement = loop(2, 1)
    durations = Durations((1.0, 1.0), (2.0, 2.0), (0.5, 0.5), latency=0.25)
    guide = repeat(Block((0.0, 0.0)), lanes_of(placement, 1), durations)
    assert first(guide.forward) == [0, 1.25]
    assert first(guide.backward) == [4.5, 2.25]


def test_blocks_are_for_one_weight_copy():
    placement = bidirectional(2)
    with pytest.raises(AssertionError):
        repeat(Block((1, 1)), lanes_of(placement, 2), equal_durations(placement))
