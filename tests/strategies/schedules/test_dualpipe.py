import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.compiler import compile_compute, compile_plan
from strategies.errors import PlanError
from strategies.ir.kinds import Kind
from strategies.ir.text import format_rows, parse_rows
from strategies.plan import Plan
from tests.strategies.programs import compute_texts, texts
from tests.strategies.schedules.dual import torchs_lists, without_pairs

SHAPES = [(2, 4), (2, 10), (4, 8), (4, 16), (6, 12), (6, 14), (8, 16), (8, 32)]


def compiled(pp, num_microbatches, costs=None):
    return compile_program(
        schedule="dualpipe", pp=pp, num_microbatches=num_microbatches, costs=costs
    )


def figures(pp, num_microbatches, **costs):
    costs = UniformCosts(**costs)
    return measure(simulate(compiled(pp, num_microbatches, costs), costs), costs)


def test_four_ranks_and_eight_microbatches():
    outer, inner, *_ = texts(compile_compute(Plan("dualpipe", 4, 8)))
    assert outer == (
        "0F0 0F2 0F4 3F1 3I1 3W1 3F3 (0F6;3B3)OVERLAP_F_B (3F5;0B0)OVERLAP_F_B 3B5 "
        "(3F7;0B2)OVERLAP_F_B 3B7 0I4 0W4 0I6 0W6"
    )
    assert inner == (
        "1F0 2F1 1F2 2F3 1F4 2B1 (2F5;1B0)OVERLAP_F_B (1F6;2B3)OVERLAP_F_B "
        "(2F7;1B2)OVERLAP_F_B 2B5 1B4 2I7 1I6 2W7 1W6"
    )


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_each_half_is_the_v_of_torch(pp, microbatches):
    """Stage s of the V is stage s here; its way out is the pipe that starts at the nearer end."""
    lists = torchs_lists(pp // 2, microbatches // 2)
    rows = texts(compile_compute(Plan("dualpipe", pp, microbatches)))
    for rank, row in enumerate(rows):
        distance = min(rank, pp - 1 - rank)

        def here(match, distance=distance, up=rank != distance):
            stage, kind, index = int(match[1]), match[2], int(match[3])
            return f"{stage}{kind}{2 * index + ((stage != distance) ^ up)}"

        expected = [re.sub(r"(\d+)([FBIW])(\d+)", here, text) for text in lists[distance]]
        assert row.split() == expected


@pytest.mark.parametrize("fused", [2.0, 2.5])
@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_the_reports_bubble(pp, microbatches, fused):
    """A middle rank runs M-P-1 pairs; the rest is (P/2-1)(F&B+B-3W)."""
    pairs = microbatches - pp - 1
    expected = 3 * microbatches - pairs * (3 - fused) + (pp // 2 - 1) * (fused + 2 - 3)
    assert figures(pp, microbatches, fused=fused).makespan == pytest.approx(expected)


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_one_half_after_the_other_leaves_a_forward_per_rank_from_the_end(pp, microbatches):
    program = without_pairs("dualpipe", pp, microbatches)
    makespan = simulate(program, UniformCosts()).makespan
    assert makespan == pytest.approx(3 * microbatches + pp // 2 - 1)


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_every_rank_holds_one_microbatch_more_than_there_are_ranks(pp, microbatches):
    assert peak_activations(compiled(pp, microbatches)) == (pp + 1,) * pp
    assert peak_activations(without_pairs("dualpipe", pp, microbatches)) == (pp + 1,) * pp


@settings(max_examples=25)
@given(
    pp=st.sampled_from([2, 4, 6, 8]),
    more=st.integers(0, 4),
    forward=st.floats(0.2, 3),
    backward=st.floats(0.2, 5),
    gain=st.floats(0.5, 1),
    latency=st.floats(0, 1),
)
def test_any_even_number_from_2p_on_runs(pp, more, forward, backward, gain, latency):
    costs = UniformCosts(forward, backward, p2p=latency, fused=gain * (forward + backward))
    program = compiled(pp, 2 * pp + 2 * more, costs)
    result = measure(simulate(program, costs), costs)
    assert result.makespan >= result.lower_bound * (1 - 1e-9)
    assert result.weight_copies == 2
    assert parse_rows(format_rows(program.ranks)) == program.ranks


def test_evaluation_runs_the_forwards_of_the_pairs():
    programs = compile_plan(Plan("dualpipe", 4, 10, costs=UniformCosts(fused=2.5)))
    for rank, row in enumerate(compute_texts(programs.forward)):
        parts = [part for item in programs.train.ranks[rank] for part in item.parts]
        assert row.split() == [str(part) for part in parts if part.kind is Kind.F]
    kinds = {item.kind for row in programs.accumulate.ranks for item in row}
    assert Kind.OVERLAP in kinds
    assert Kind.STEP not in kinds


def refused(pp, num_microbatches):
    with pytest.raises(PlanError) as error:
        compiled(pp, num_microbatches)
    return str(error.value)


def test_too_few_microbatches_are_refused():
    assert refused(4, 6) == (
        "num_microbatches=6: dualpipe gives half of the microbatches to each of two opposed "
        "pipelines and needs an even number >= 2 * pp = 8. Try num_microbatches=8."
    )


def test_odd_numbers_are_refused():
    assert refused(4, 13).endswith("Try num_microbatches=12 or num_microbatches=14.")
    assert refused(5, 10).endswith("Try pp=4 or pp=6 num_microbatches=12.")
    assert refused(1, 2).endswith("Try pp=2 num_microbatches=4.")
