import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.errors import PlanError
from tests.strategies.programs import compute_texts, lines


def figures(pp, microbatches, **costs):
    program = compile_program(schedule="eager_1f1b", pp=pp, num_microbatches=microbatches)
    return measure(simulate(program, UniformCosts(**costs)), UniformCosts(**costs))


def test_three_ranks_run_five_three_and_one_forwards_first():
    program = compile_program(schedule="eager_1f1b", pp=3, num_microbatches=5)
    assert lines(draw(simulate(program, UniformCosts()))) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3 0F4  .   .  0B0  -   .  0B1  -   .  0B2  -   .  0B3  -   .  0B4  -
        rank 1 |  .  1F0 1F1 1F2  .  1B0  -  1F3 1B1  -  1F4 1B2  -   .  1B3  -   .  1B4  -   .   .
        rank 2 |  .   .  2F0 2B0  -  2F1 2B1  -  2F2 2B2  -  2F3 2B3  -  2F4 2B4  -   .   .   .   .
        """
    )


def test_one_rank_alternates_from_the_start():
    program = compile_program(schedule="eager_1f1b", pp=1, num_microbatches=2)
    assert compute_texts(program) == ["0F0 0B0 0F1 0B1"]


@pytest.mark.parametrize("backward", [1.0, 2.0, 2.5])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 16])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_bubble_of_1f1b_at_almost_twice_its_memory(pp, microbatches, backward):
    result = figures(pp, microbatches, backward=backward)
    assert result.makespan == pytest.approx((microbatches + pp - 1) * (1 + backward))
    assert result.bound_gap == pytest.approx(0, abs=1e-9)
    peaks = tuple(min(2 * (pp - rank) - 1, microbatches) for rank in range(pp))
    assert result.peak_activations == peaks


@pytest.mark.parametrize("p2p", [0.25, 0.5, 1.0, 1.5])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_a_latency_of_up_to_half_of_f_and_b_is_hidden(pp, microbatches, p2p):
    result = figures(pp, microbatches, p2p=p2p)
    assert result.bound_gap == pytest.approx(0, abs=1e-9)
    assert result.makespan == pytest.approx(3 * microbatches + (pp - 1) * (3 + 2 * p2p))


def test_a_longer_latency_is_not():
    assert figures(4, 8, p2p=2.0).bound_gap > 0.06


@settings(max_examples=25)
@given(pp=st.integers(1, 8), microbatches=st.integers(1, 16), p2p=st.floats(0, 2))
def test_it_runs_for_every_number_of_microbatches(pp, microbatches, p2p):
    result = figures(pp, microbatches, p2p=p2p)
    assert result.bound_gap >= -1e-9
    eager = compile_program(schedule="eager_1f1b", pp=pp, num_microbatches=microbatches)
    plain = compile_program(schedule="1f1b", pp=pp, num_microbatches=microbatches)
    assert max(peak_activations(eager)) <= max(1, 2 * max(peak_activations(plain)) - 1)
    assert result.makespan <= simulate(plain, UniformCosts(p2p=p2p)).makespan + 1e-9


def test_it_has_no_virtual_stages():
    with pytest.raises(PlanError, match=r"schedule\.stages_per_rank=2: eager_1f1b runs 1 per"):
        compile_program(schedule="eager_1f1b", pp=2, num_microbatches=2, stages_per_rank=2)
