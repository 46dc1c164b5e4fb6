import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.compiler import compile_compute, compile_plan
from strategies.errors import PlanError
from strategies.ir.kinds import Kind
from strategies.ir.placement import v
from strategies.ir.text import format_rows, parse_rows
from strategies.plan import Plan
from tests.strategies.programs import compute_texts, texts
from tests.strategies.schedules.dual import torchs_lists, without_pairs

SHAPES = [(1, 2), (1, 5), (2, 4), (2, 9), (3, 6), (4, 8), (4, 16), (8, 16), (8, 32)]


def compiled(pp, num_microbatches, costs=None):
    return compile_program(
        schedule="dualpipe_v", pp=pp, num_microbatches=num_microbatches, costs=costs
    )


def figures(pp, num_microbatches, **costs):
    costs = UniformCosts(**costs)
    return measure(simulate(compiled(pp, num_microbatches, costs), costs), costs)


def test_two_ranks_and_four_microbatches():
    assert texts(compile_compute(Plan("dualpipe_v", 2, 4))) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 "
        "(3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B "
        "(2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_the_order_is_that_of_torch(pp, microbatches):
    program = compile_compute(Plan("dualpipe_v", pp, microbatches))
    assert program.placement == v(pp)
    assert [row.split() for row in texts(program)] == torchs_lists(pp, microbatches)


@pytest.mark.parametrize("fused", [2.0, 2.5])
@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_the_reports_bubble_with_p_doubled(pp, microbatches, fused):
    """The last rank runs 2(M-P)-1 pairs of virtual stages."""
    pairs = 2 * (microbatches - pp) - 1
    expected = 3 * microbatches - pairs * (3 - fused) / 2 + (pp - 1) * (fused + 2 - 3) / 2
    assert figures(pp, microbatches, fused=fused).makespan == pytest.approx(expected)


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_one_half_after_the_other_leaves_half_a_forward_per_rank(pp, microbatches):
    program = without_pairs("dualpipe_v", pp, microbatches)
    makespan = simulate(program, UniformCosts()).makespan
    assert makespan == pytest.approx(3 * microbatches + (pp - 1) / 2)


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_every_rank_holds_half_a_microbatch_more_than_there_are_ranks(pp, microbatches):
    assert peak_activations(compiled(pp, microbatches)) == (pp + 0.5,) * pp


@settings(max_examples=25)
@given(
    pp=st.integers(1, 8),
    more=st.integers(0, 8),
    forward=st.floats(0.2, 3),
    backward=st.floats(0.2, 5),
    gain=st.floats(0.5, 1),
    latency=st.floats(0, 1),
)
def test_any_number_from_2p_on_runs(pp, more, forward, backward, gain, latency):
    costs = UniformCosts(forward, backward, p2p=latency, fused=gain * (forward + backward))
    program = compiled(pp, 2 * pp + more, costs)
    result = measure(simulate(program, costs), costs)
    assert result.makespan >= result.lower_bound * (1 - 1e-9)
    assert result.weight_copies == 1
    assert parse_rows(format_rows(program.ranks)) == program.ranks


def test_evaluation_runs_the_forwards_of_the_pairs():
    programs = compile_plan(Plan("dualpipe_v", 3, 7))
    for rank, row in enumerate(compute_texts(programs.forward)):
        parts = [part for item in programs.train.ranks[rank] for part in item.parts]
        assert row.split() == [str(part) for part in parts if part.kind is Kind.F]


def test_too_few_microbatches_are_refused():
    with pytest.raises(PlanError) as error:
        compiled(4, 7)
    assert str(error.value) == (
        "num_microbatches=7: dualpipe_v fills a V of 8 stages before its first fused pair and "
        "needs num_microbatches >= 2 * pp. Try num_microbatches=8."
    )
