import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies.programs import lines
from tests.strategies.schedules.figures import figures, picture
from tests.strategies.schedules.timed_orders import placement_of, rows_of, timed, uniform


def test_the_papers_figure():
    assert picture("zb_h2", 3, 6) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5  .   .
        rank 1 |  .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5  .
        rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5
        """
    )


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_as_many_microbatches_as_ranks_take_no_longer_than_zb_h1(pp):
    """The paper's warm-up delays gradients that a short step has nothing to hide behind."""
    found = figures("zb_h2", pp, pp)
    assert found.makespan == found.period == 3 * pp + (pp - 1)
    assert max(found.peak_activations) <= pp


@settings(max_examples=25, deadline=None)
@given(
    pp=st.integers(2, 8),
    rounds=st.integers(2, 4),
    backward_input=st.floats(0.4, 2.5),
    share=st.floats(0.2, 1.0),
    latency=st.sampled_from([0.0, 0.05, 0.2]),
)
def test_no_order_in_this_memory_has_a_shorter_period_where_w_is_shortest_and_all_stages_alike(
    pp, rounds, backward_input, share, latency
):
    microbatches, backward_weight = rounds * pp, share * min(1.0, backward_input)
    placement = placement_of("zb_h2", pp)
    durations = uniform(placement, 1.0, backward_input, backward_weight, latency=latency)
    rows = rows_of("zb_h2", pp, microbatches, durations)
    order = timed(placement, microbatches, rows, durations)
    # The last rank: all F and I, and the W that its memory asks for before its last F.
    weights = (microbatches - (2 * pp - 1)) * backward_weight
    last = (pp - 1) * (1.0 + latency) + microbatches * (1.0 + backward_input) + weights
    least = last + (pp - 1) * (backward_input + latency) + backward_weight
    work = microbatches * (1.0 + backward_input + backward_weight)
    assert order.span == pytest.approx(max(work, least))
    assert order.peak <= 2 * pp - 1
