from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.ir.program import bidirectional, loop, v
from strategies.schedules.schedule import Durations
from strategies.schedules.search.best_order import equal_durations
from strategies.schedules.search.greedy import Guide, Policy, walk
from strategies.schedules.search.lanes import F, I, W, lanes_of, next_of, replay
from strategies.schedules.zb_v import ZB_V
from tests.strategies.schedules.timed_orders import rows_of, timed, uneven_durations


def test_a_lane_is_a_stage_of_a_weight_copy():
    lanes = lanes_of(bidirectional(2), 5)
    assert lanes.rank == (0, 1, 1, 0)
    assert lanes.stage == (0, 1, 0, 1)
    assert lanes.size == (3, 3, 2, 2)
    assert lanes.of_rank == ((0, 3), (2, 1))
    assert (lanes.num_stages, lanes.num_copies, lanes.num_microbatches) == (2, 2, 5)


def test_a_rank_names_its_lowest_stage_first():
    assert lanes_of(v(3), 1).of_rank == ((0, 5), (1, 4), (2, 3))
    assert lanes_of(loop(2, 2), 1).of_rank == ((0, 2), (1, 3))


def test_odd_microbatches_run_on_the_second_copy():
    lanes = lanes_of(bidirectional(2), 4)
    rows = lanes.rows([[(F, 0, 1), (I, 3, 0)], [(F, 2, 1), (W, 1, 0)]])
    assert [" ".join(map(str, row)) for row in rows] == ["0F2 1I1", "0F3 1W0"]
    assert lanes.steps(rows) == [[(F, 0, 1), (I, 3, 0)], [(F, 2, 1), (W, 1, 0)]]


def test_instructions_come_back_as_they_were():
    rows = rows_of(ZB_V.name, 3, 7, None)
    lanes = lanes_of(v(3), 7)
    assert lanes.rows(lanes.steps(rows)) == rows


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    placement=st.sampled_from([loop(3, 1), loop(2, 2), v(3), v(2, 4), bidirectional(4)]),
    microbatches=st.integers(1, 6),
)
def test_times_are_those_of_the_simulator(data, placement, microbatches):
    durations = data.draw(uneven_durations(placement.num_stages))
    lanes = lanes_of(placement, microbatches)
    random = data.draw(st.randoms(use_true_random=False))
    wishes = tuple(tuple(sorted(random.uniform(0, 9) for _ in range(n))) for n in lanes.size)
    steps = walk(
        lanes, durations, caps=(9,) * len(lanes.of_rank), policy=Policy(Guide(wishes, wishes))
    )
    times = replay(lanes, durations, steps)
    order = timed(placement, microbatches, lanes.rows(steps), durations)
    assert times.makespan == pytest.approx(order.timeline.makespan)
    assert times.period == pytest.approx(order.span)
    begun = {
        (
            event.instruction.kind.value,
            event.instruction.stage,
            event.instruction.microbatch,
        ): event.start
        for rank in range(len(lanes.of_rank))
        for event in order.timeline.compute(rank)
    }
    for lane, size in enumerate(lanes.size):
        for index in range(size):
            microbatch = index * lanes.num_copies + lane // lanes.num_stages
            here = (lanes.stage[lane], microbatch)
            assert times.forward[lane][index] == pytest.approx(begun["F", *here])
            assert times.backward[lane][index] == pytest.approx(begun["I", *here])


def test_messages_take_their_latency_between_ranks_only():
    lanes = lanes_of(v(2), 1)
    durations = Durations((1.0,) * 4, (2.0,) * 4, (4.0,) * 4, latency=0.5)
    rows = [
        [(F, 0, 0), (F, 3, 0), (I, 3, 0), (I, 0, 0), (W, 0, 0), (W, 3, 0)],
        [(F, 1, 0), (F, 2, 0), (I, 2, 0), (I, 1, 0), (W, 1, 0), (W, 2, 0)],
    ]
    times = replay(lanes, durations, rows)
    assert times.forward == ((0.0,), (1.5,), (2.5,), (4.0,))
    assert times.backward == ((12.0,), (9.5,), (7.5,), (5.0,))
    assert times.makespan == times.period == 22.0


def test_an_order_that_waits_for_itself_is_not_timed():
    lanes = lanes_of(loop(1, 1), 1)
    with pytest.raises(AssertionError):
        replay(lanes, equal_durations(loop(1, 1)), [[(I, 0, 0), (F, 0, 0), (W, 0, 0)]])


def test_the_last_forward_is_followed_by_its_own_backward():
    lanes = lanes_of(bidirectional(2), 2)
    assert [next_of(lanes, F, lane) for lane in range(4)] == [(1, F), (1, I), (3, F), (3, I)]
    assert [next_of(lanes, I, lane) for lane in range(4)] == [(-1, I), (0, I), (-1, I), (2, I)]
