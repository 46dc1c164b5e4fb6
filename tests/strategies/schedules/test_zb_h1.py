import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strategies.schedules.zb_h1 import split_1f1b
from tests.strategies.programs import lines
from tests.strategies.schedules.figures import picture
from tests.strategies.schedules.timed_orders import placement_of, rows_of, timed, uniform


def test_the_papers_figure():
    assert picture("zb_h1", 4, 4) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3  .   .   .  0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1 |  .  1F0 1F1 1F2  .   .  1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3
        rank 2 |  .   .  2F0 2F1  .  2I0 2F2 2I1 2F3 2I2 2W0 2I3 2W1 2W2 2W3
        rank 3 |  .   .   .  3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3W2 3W3
        """
    )


@settings(max_examples=25, deadline=None)
@given(
    pp=st.integers(2, 8),
    rounds=st.integers(2, 4),
    backward_input=st.floats(0.4, 2.5),
    backward_weight=st.floats(0.2, 2.5),
    latency=st.sampled_from([0.0, 0.05, 0.3]),
)
@example(pp=4, rounds=2, backward_input=1.2, backward_weight=0.8, latency=0.0)
@example(pp=8, rounds=4, backward_input=1.5, backward_weight=0.6, latency=0.0)
def test_no_order_in_this_memory_is_faster_where_w_is_shortest_and_all_stages_alike(
    pp, rounds, backward_input, backward_weight, latency
):
    """The docstring's argument: rank 0 cannot begin its last forward any earlier."""
    microbatches = rounds * pp
    placement = placement_of("zb_h1", pp)
    durations = uniform(placement, 1.0, backward_input, backward_weight, latency=latency)
    rows = rows_of("zb_h1", pp, microbatches, durations)
    order = timed(placement, microbatches, rows, durations)
    first_gradient = pp + (pp - 1) * (2 * latency + backward_input)
    work = 1.0 + backward_input + backward_weight
    last_forward = first_gradient + (microbatches - pp) * work
    down_and_back = (pp - 1) * (1.0 + backward_input + 2 * latency)
    least = last_forward + down_and_back + backward_input + backward_weight
    assert order.figures.makespan >= least * (1 - 1e-9)
    if backward_weight <= min(1.0, backward_input) and not latency:
        bubble = (pp - 1) * (1.0 + backward_input - backward_weight)
        assert least == pytest.approx(microbatches * work + bubble)
        assert order.figures.makespan == pytest.approx(least)


def texts(pp, num_microbatches, warmup, lag):
    rows = split_1f1b(pp, num_microbatches, warmup=lambda rank: warmup, lag=lambda rank: lag)
    return [" ".join(map(str, row)) for row in rows]


def test_weight_gradients_follow_their_lag_behind():
    assert texts(1, 4, 1, 1) == ["0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0I3 0W2 0W3"]


def test_without_a_lag_each_follows_at_once():
    assert texts(1, 2, 0, 0) == ["0F0 0I0 0W0 0F1 0I1 0W1"]


def test_a_warm_up_and_a_lag_longer_than_the_step_leave_three_blocks():
    assert texts(2, 2, 5, 5) == ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1F1 1I0 1I1 1W0 1W1"]
