from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.ir.placement import v
from strategies.schedules.search.best_order import equal_durations
from strategies.schedules.zb_v import _regular
from strategies.simulator.engine import unroll
from tests.strategies.programs import compute_texts, lines
from tests.strategies.schedules.test_torch_oracle import of_torch
from tests.strategies.schedules.timed_orders import timed


def figures(pp, num_microbatches, **given_costs):
    costs = UniformCosts(**given_costs)
    program = compile_program(schedule="zb_v", pp=pp, num_microbatches=num_microbatches)
    return program, measure(simulate(program, costs), costs)


def test_the_papers_order():
    program = compile_program(schedule="zb_v", pp=2, num_microbatches=4)
    assert lines(draw(simulate(program, UniformCosts()))) == lines(
        """
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2
        rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1

        rank 0 | 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .
        rank 1 | 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
        """
    )


@pytest.mark.parametrize("more", [0, 1, 9])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_papers_bubble_and_memory(pp, more):
    microbatches = 2 * pp - 1 + more
    program, metrics = figures(pp, microbatches)
    assert metrics.makespan == 3 * microbatches + (pp - 1) / 2
    assert metrics.period == 3 * microbatches
    assert metrics.bound_gap == pytest.approx(0, abs=1e-9)
    assert peak_activations(program) == (pp,) * pp


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


@pytest.mark.parametrize("microbatches", [1, 2, 4, 7, 8, 16])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_it_takes_no_longer_than_the_order_of_torch(pp, microbatches):
    """torch's is the paper's, too; below 2P-1 microbatches it only leaves out what is not there."""
    theirs = of_torch("ZBVZeroBubble", pp, microbatches, 2)
    paper = _regular(pp, microbatches)
    assert [" ".join(map(str, row)) for row in paper] == theirs
    program, metrics = figures(pp, microbatches)
    if microbatches >= 2 * pp - 1:
        assert compute_texts(program) == theirs
    reference = timed(v(pp), microbatches, paper, equal_durations(v(pp))).figures
    # Two stages of 1 each here, two of 1/2 each in figures().
    assert metrics.makespan <= reference.makespan / 2
    assert metrics.period <= reference.period / 2


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_as_many_microbatches_as_ranks_are_on_the_bound(pp):
    """Where the paper's order takes (P-1)F longer, three times the bubble."""
    _, metrics = figures(pp, pp)
    assert metrics.makespan == 3 * pp + (pp - 1) / 2
    assert metrics.bound_gap == pytest.approx(0, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(pp=st.integers(1, 8), microbatches=st.integers(1, 16))
def test_any_number_of_microbatches(pp, microbatches):
    program, metrics = figures(pp, microbatches)
    assert metrics.makespan >= metrics.lower_bound - 1e-9
    assert max(peak_activations(program)) <= min(pp, microbatches)


def test_one_rank_runs_both_stages():
    program = compile_program(schedule="zb_v", pp=1, num_microbatches=2)
    assert compute_texts(program) == ["0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"]
