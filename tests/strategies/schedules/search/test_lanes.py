from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.ir.program import Program, bidirectional, chain, loop, v
from strategies.schedules.schedule import Durations
from strategies.schedules.search.greedy import Policy, Priorities, walk
from strategies.schedules.search.lanes import F, I, W, lanes_of, next_of
from strategies.schedules.search.weight_gaps import times_of
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
    walked = walk(
        lanes, durations, caps=(9,) * len(lanes.of_rank), policy=Policy(Priorities(wishes, wishes))
    )
    order = timed(placement, microbatches, lanes.rows(walked.steps), durations)
    assert walked.makespan == pytest.approx(order.timeline.makespan)
    assert walked.period == pytest.approx(order.span)


def test_messages_take_their_latency_between_ranks_only():
    lanes = lanes_of(v(2), 1)
    durations = Durations((1.0,) * 4, (2.0,) * 4, (4.0,) * 4, latency=0.5)
    rows = lanes.rows([
        [(F, 0, 0), (F, 3, 0), (I, 3, 0), (I, 0, 0), (W, 0, 0), (W, 3, 0)],
        [(F, 1, 0), (F, 2, 0), (I, 2, 0), (I, 1, 0), (W, 1, 0), (W, 2, 0)],
    ])  # fmt: skip
    start, end = times_of(Program("one", v(2), 1, rows, chain(4)), durations)
    assert start == [0.0, 4.0, 5.0, 12.0, 14.0, 18.0, 1.5, 2.5, 7.5, 9.5, 11.5, 15.5]
    assert max(end) == 22.0


def test_the_last_forward_is_followed_by_its_own_backward():
    lanes = lanes_of(bidirectional(2), 2)
    assert [next_of(lanes, F, lane) for lane in range(4)] == [(1, F), (1, I), (3, F), (3, I)]
    assert [next_of(lanes, I, lane) for lane in range(4)] == [(-1, I), (0, I), (-1, I), (2, I)]
