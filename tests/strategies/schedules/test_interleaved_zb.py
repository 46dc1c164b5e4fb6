from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts
from strategies.analysis.memory import peak_activations
from strategies.ir.program import Program, chain
from strategies.ir.verify import verify
from strategies.schedules import SCHEDULES, Durations, Shape
from strategies.schedules.search.weight_gaps import makespan
from tests.strategies.programs import compute_texts, lines
from tests.strategies.schedules.figures import compiled, figures, picture


def made_for(durations, pp, microbatches, stages=2):
    """The bare order, verified."""
    schedule = SCHEDULES["interleaved_zb"]
    shape = Shape(pp, microbatches, stages, group=pp, durations=durations)
    placement = schedule.place(shape)
    rows = schedule.order(shape)
    return verify(
        Program("interleaved_zb", placement, microbatches, rows, chain(placement.num_stages))
    )


def test_two_stages_per_rank():
    assert picture("interleaved_zb", 2, 4) == lines(
        """
        rank 0 | 0F0 0F1 2F0 2F1  .  2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0
        rank 1 |  .  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1

        rank 0 | 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        rank 1 | 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3
        """
    )


def test_a_last_group_that_is_not_full_leaves_the_missing_microbatches_out():
    assert compute_texts(compiled("interleaved_zb", 2, 3, 2, 2)) == lines(
        """
        0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0I0 0W0 2F2 0I1 0W1 2I2 2W2 0I2 0W2
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1I1 1W0 3F2 3I2 1W1 3W2 1I2 1W2
        """
    )


def test_the_figures_of_four_ranks_and_eight_microbatches():
    result = figures("interleaved_zb", 4, 8)
    assert result.makespan == 25.5
    assert result.peak_activations == (4, 4, 4, 4)


def test_a_group_is_the_number_of_microbatches_per_round():
    found = figures("interleaved_zb", 4, 16, 2, 8)
    assert found.makespan == 49.5
    assert found.peak_activations == (6, 6, 6, 6)


@pytest.mark.parametrize(
    ("backward", "inputs", "p2p"), list(product([1.0, 2.0, 3.0], [0.3, 0.5, 0.7], [0.0, 0.25]))
)
def test_costs_that_are_equal_on_all_stages_change_no_peak_and_cost_no_time(backward, inputs, p2p):
    costs = UniformCosts(backward=backward, backward_input=inputs * backward, p2p=p2p)
    tuned = figures("interleaved_zb", 4, 8, costs=costs, made_for=costs)
    assert tuned.makespan <= figures("interleaved_zb", 4, 8, costs=costs).makespan + 1e-9
    assert max(tuned.peak_activations) <= 4


per_stage = st.lists(st.floats(0.2, 3.0), min_size=8, max_size=8).map(tuple)


@settings(max_examples=25)
@given(per_stage, per_stage, per_stage, st.floats(0, 1), st.integers(1, 9))
def test_made_for_uneven_costs_it_is_never_slower_nor_larger(first, second, third, latency, m):
    durations = Durations(first, second, third, latency)
    plain, tuned = made_for(None, 4, m), made_for(durations, 4, m)
    assert makespan(tuned, durations) <= makespan(plain, durations) * (1 + 1e-9)
    assert max(peak_activations(tuned)) <= max(peak_activations(plain))


def test_made_for_uneven_costs_it_can_be_faster():
    durations = Durations(
        forward=(1.0, 2.0, 1.0, 1.0),
        backward_input=(1.0, 1.0, 1.0, 2.0),
        backward_weight=(2.0, 0.5, 1.0, 1.0),
        latency=0.3,
    )
    plain, tuned = made_for(None, 2, 6), made_for(durations, 2, 6)
    assert makespan(tuned, durations) < makespan(plain, durations) - 0.1


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_it_is_the_order_of_torch(pp, rounds, stages):
    torch = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = torch.get_schedule_ops("InterleavedZeroBubble", pp, rounds * pp, stages)
    expected = [" ".join(str(action) for action in row if action is not None) for row in rows]
    assert compute_texts(compiled("interleaved_zb", pp, rounds * pp, stages)) == expected
