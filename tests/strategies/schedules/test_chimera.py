import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.compiler import compile_plan
from strategies.errors import PlanError
from strategies.ir.text import format_rows, parse_rows
from strategies.plan import Plan
from tests.strategies.programs import compute_texts, lines


def compiled(pp, num_microbatches):
    return compile_program(schedule="chimera", pp=pp, num_microbatches=num_microbatches)


def figures(pp, num_microbatches, **costs):
    costs = UniformCosts(**costs)
    return measure(simulate(compiled(pp, num_microbatches), costs), costs)


def picture(pp, num_microbatches):
    return lines(draw(simulate(compiled(pp, num_microbatches), UniformCosts())))


def test_the_papers_figure():
    assert picture(4, 4) == lines(
        """
        rank 0 | 0F0 0F2  .  3F1 3B1  -  3F3 3B3  -   .  0B0  -   .   .  0B2  -
        rank 1 |  .  1F0 2F1 1F2 2F3  .  2B1  -  1B0  -  2B3  -  1B2  -   .   .
        rank 2 |  .  1F1 2F0 1F3 2F2  .  2B0  -  1B1  -  2B2  -  1B3  -   .   .
        rank 3 | 0F1 0F3  .  3F0 3B0  -  3F2 3B2  -   .  0B1  -   .   .  0B3  -
        """
    )


def test_more_microbatches_continue_the_pattern():
    assert picture(4, 8) == lines(
        """
        rank 0 | 0F0 0F2 0F4 3F1 3B1  -  3F3 3B3  -  0F6  .  0B0  -  3F5
        rank 1 |  .  1F0 2F1 1F2 2F3  .  2B1  -  1F4 1B0  -  2F5 2B3  -
        rank 2 |  .  1F1 2F0 1F3 2F2  .  2B0  -  1F5 1B1  -  2F4 2B2  -
        rank 3 | 0F1 0F3 0F5 3F0 3B0  -  3F2 3B2  -  0F7  .  0B1  -  3F4

        rank 0 | 3B5  -   .  0B2  -  3F7 3B7  -  0B4  -   .   .  0B6  -
        rank 1 | 1F6 1B2  -  2F7 2B5  -  1B4  -  2B7  -  1B6  -   .   .
        rank 2 | 1F7 1B3  -  2F6 2B4  -  1B5  -  2B6  -  1B7  -   .   .
        rank 3 | 3B4  -   .  0B3  -  3F6 3B6  -  0B5  -   .   .  0B7  -
        """
    )


def test_two_ranks_alternate_without_a_bubble():
    assert compute_texts(compiled(2, 4)) == [
        "0F0 1F1 1B1 0F2 0B0 1F3 1B3 0B2",
        "0F1 1F0 1B0 0F3 0B1 1F2 1B2 0B3",
    ]
    assert figures(2, 4).bubble_ratio == 0


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_up_to_p_microbatches_each_pipe_is_1f1b(pp):
    for num_microbatches in range(2, pp + 1, 2):
        half = compile_program(schedule="1f1b", pp=pp, num_microbatches=num_microbatches // 2)
        rows = compute_texts(compiled(pp, num_microbatches))
        for rank, row in enumerate(rows):
            for way, stage in ((0, rank), (1, pp - 1 - rank)):
                names = [word for word in row.split() if int(word[2:]) % 2 == way]
                renumbered = [f"{name[:2]}{int(name[2:]) // 2}" for name in names]
                assert renumbered == compute_texts(half)[stage].split()


@pytest.mark.parametrize("backward", [0.5, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_the_bubble_is_that_of_the_middle_whatever_the_number_of_microbatches(pp, backward):
    for microbatches in (pp, pp + 2, 2 * pp, 2 * pp + 2, 4 * pp):
        expected = microbatches * (1 + backward) + (pp - 2) * max(1, backward)
        assert figures(pp, microbatches, backward=backward).makespan == pytest.approx(expected)


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(("pp", "microbatches"), [(4, 2), (6, 2), (6, 4), (8, 2), (8, 4), (8, 6)])
def test_fewer_microbatches_than_ranks(pp, microbatches, backward):
    expected = pp + (microbatches + pp - 2) * backward
    assert figures(pp, microbatches, backward=backward).makespan == pytest.approx(expected)


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_no_rank_holds_more_than_p_activations(pp):
    for microbatches in (2 * pp - 2, 2 * pp, 4 * pp):
        assert peak_activations(compiled(pp, microbatches)) == (pp,) * pp
    unit = tuple(pp // 2 + min(rank, pp - 1 - rank) + 1 for rank in range(pp))
    assert peak_activations(compiled(pp, pp)) == unit


@pytest.mark.parametrize("pp", [4, 6, 8])
def test_its_unit_sits_on_the_bound(pp):
    assert figures(pp, pp).bound_gap == pytest.approx(0)


@settings(max_examples=25)
@given(
    pp=st.sampled_from([2, 4, 6, 8]),
    half=st.integers(1, 8),
    forward=st.floats(0.2, 3),
    backward=st.floats(0.2, 5),
    latency=st.floats(0, 1),
)
def test_any_even_number_of_microbatches_runs(pp, half, forward, backward, latency):
    program = compiled(pp, 2 * half)
    costs = UniformCosts(forward=forward, backward=backward, p2p=latency)
    result = measure(simulate(program, costs), costs)
    assert result.makespan >= result.lower_bound * (1 - 1e-9)
    assert max(result.peak_activations) <= min(pp, 2 * half)
    assert result.weight_copies == 2
    assert parse_rows(format_rows(program.ranks)) == program.ranks


def test_evaluation_and_accumulation_come_with_it():
    programs = compile_plan(Plan("chimera", 4, 6))
    forwards = [[i for i in row.split() if "F" in i] for row in compute_texts(programs.train)]
    assert [row.split() for row in compute_texts(programs.forward)] == forwards
    assert compute_texts(programs.accumulate) == compute_texts(programs.train)


def refused(pp, num_microbatches):
    with pytest.raises(PlanError) as error:
        compiled(pp, num_microbatches)
    return str(error.value)


def test_an_odd_number_of_ranks_is_refused():
    assert refused(3, 8) == (
        "pp=3 is odd: chimera runs two opposed pipelines, which meet between two ranks. "
        "Try pp=2 or pp=4."
    )
    assert refused(1, 3).endswith("Try pp=2 num_microbatches=4.")


def test_an_odd_number_of_microbatches_is_refused():
    assert refused(4, 7) == (
        "num_microbatches=7: chimera gives half of the microbatches to each of two opposed "
        "pipelines and needs an even number. Try num_microbatches=6 or num_microbatches=8."
    )
    assert refused(2, 1).endswith("Try num_microbatches=2.")
