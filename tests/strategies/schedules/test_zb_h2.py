from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.simulator.engine import unroll
from tests.strategies.programs import compute_texts, lines
from tests.strategies.schedules.timed_orders import placement_of, rows_of, timed, uniform


def figures(pp, num_microbatches, **given_costs):
    costs = UniformCosts(**given_costs)
    program = compile_program(schedule="zb_h2", pp=pp, num_microbatches=num_microbatches)
    return program, measure(simulate(program, costs), costs)


def test_the_papers_figure():
    program = compile_program(schedule="zb_h2", pp=3, num_microbatches=6)
    assert lines(draw(simulate(program, UniformCosts()))) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5  .   .
        rank 1 |  .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5  .
        rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5
        """
    )


@pytest.mark.parametrize("more", [0, 1, 9])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_papers_bubble_and_memory(pp, more):
    microbatches = 2 * pp - 1 + more
    program, metrics = figures(pp, microbatches)
    assert metrics.makespan == 3 * microbatches + (pp - 1)
    assert metrics.period == 3 * microbatches
    assert metrics.bound_gap == pytest.approx(0, abs=1e-9)
    assert peak_activations(program) == (2 * pp - 1,) * pp


@pytest.mark.parametrize("more", [0, 1, 9])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_without_a_barrier_a_step_takes_the_work_of_one_rank(pp, more):
    """Every rank begins the next step one period later, while others still drain."""
    microbatches = 2 * pp - 1 + more
    program, metrics = figures(pp, microbatches)
    steps = unroll(program, UniformCosts(), steps=3)
    begun = [[min(row) for row in step.start] for step in steps]
    for before, after in pairwise(begun):
        assert [b - a for a, b in zip(before, after, strict=True)] == [3 * microbatches] * pp
    assert metrics.period == 3 * microbatches


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_as_many_microbatches_as_ranks_take_no_longer_than_zb_h1(pp):
    """The paper's warm-up delays gradients that a short step has nothing to hide behind."""
    program, metrics = figures(pp, pp)
    assert metrics.makespan == metrics.period == 3 * pp + (pp - 1)
    assert max(peak_activations(program)) <= pp


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


@settings(max_examples=25, deadline=None)
@given(pp=st.integers(1, 8), microbatches=st.integers(1, 16))
def test_any_number_of_microbatches(pp, microbatches):
    program, metrics = figures(pp, microbatches)
    assert metrics.makespan >= metrics.lower_bound - 1e-9
    assert max(peak_activations(program)) <= min(2 * pp - 1, microbatches)


def test_one_rank_runs_microbatch_after_microbatch():
    program = compile_program(schedule="zb_h2", pp=1, num_microbatches=2)
    assert compute_texts(program) == ["0F0 0I0 0W0 0F1 0I1 0W1"]
