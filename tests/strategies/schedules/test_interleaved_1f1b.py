import pytest

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.errors import PlanError
from tests.strategies.programs import compute_texts, lines


def compiled(pp, num_microbatches, stages_per_rank=None, group=None):
    return compile_program(
        schedule="interleaved_1f1b",
        pp=pp,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
        group=group,
    )


def picture(*shape):
    return lines(draw(simulate(compiled(*shape), UniformCosts())))


def test_two_stages_per_rank():
    assert picture(2, 4) == lines(
        """
        rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0  -  0F3 2B1  -  2F2 0B0  -
        rank 1 |  .  1F0 1F1 3F0 3B0  -  3F1 3B1  -  1F2 1B0  -  1F3 1B1

        rank 0 | 2F3 0B1  -   .  2B2  -   .  2B3  -  0B2  -  0B3  -
        rank 1 |  -  3F2 3B2  -  3F3 3B3  -  1B2  -  1B3  -   .   .
        """
    )


def test_a_last_group_that_is_not_full_keeps_the_order_of_a_full_one():
    assert picture(2, 3, 2, 2) == lines(
        """
        rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0  -   .  2B1  -
        rank 1 |  .  1F0 1F1 3F0 3B0  -  3F1 3B1  -  1F2 1B0

        rank 0 | 2F2 0B0  -  0B1  -   .  2B2  -   .   .  0B2  -
        rank 1 |  -  1B1  -  3F2 3B2  -   .   .  1B2  -   .   .
        """
    )


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
def test_no_number_of_microbatches_leaves_it_above_the_bound(pp, stages):
    for microbatches in range(1, 3 * pp + 2):
        for costs in (UniformCosts(), UniformCosts(forward=1, backward=2.2, backward_input=1.3)):
            found = measure(simulate(compiled(pp, microbatches, stages), costs), costs)
            assert found.bound_gap == pytest.approx(0, abs=1e-9)


def test_a_group_of_all_microbatches_runs_chunk_after_chunk():
    assert picture(2, 4, 2, 4) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2  .  2B0  -  2F3 2B1  -
        rank 1 |  .  1F0 1F1 1F2 1F3 3F0 3B0  -  3F1 3B1  -  3F2 3B2

        rank 0 |  .  2B2  -   .  2B3  -  0B0  -  0B1  -  0B2  -  0B3  -
        rank 1 |  -  3F3 3B3  -  1B0  -  1B1  -  1B2  -  1B3  -   .   .
        """
    )


def test_one_rank_interleaves_its_own_stages():
    assert compute_texts(compiled(1, 2)) == ["0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"]


def test_three_stages_per_rank():
    assert compute_texts(compiled(2, 2, 3)) == lines(
        """
        0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 3B0 3B1 1B0 1B1
        """
    )


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("pp", [1, 2, 4, 5])
def test_the_papers_bubble_and_memory(pp, stages, rounds):
    microbatches = rounds * pp
    program = compiled(pp, microbatches, stages)
    figures = measure(simulate(program, UniformCosts()), UniformCosts())
    assert figures.makespan == pytest.approx(microbatches * 3 + (pp - 1) * 3 / stages)
    assert figures.gap_to_ideal == pytest.approx((pp - 1) / (stages * microbatches))
    assert figures.bound_gap == pytest.approx(0, abs=1e-9)
    assert peak_activations(program) == pytest.approx(
        tuple(
            min(stages * microbatches, 2 * (pp - 1 - rank) + (stages - 1) * pp + 1) / stages
            for rank in range(pp)
        )
    )


@pytest.mark.parametrize(("stages", "peak"), [(2, 5.5), (3, 5.0), (4, 4.75)])
def test_the_first_rank_holds_pp_plus_pp_minus_1_over_v(stages, peak):
    assert peak_activations(compiled(4, 16, stages))[0] == pytest.approx(peak)
    assert peak == 4 + 3 / stages


@pytest.mark.parametrize("group", [4, 8, 16])
def test_a_larger_group_costs_memory_and_no_time(group):
    program = compiled(4, 16, 4, group)
    assert simulate(program, UniformCosts()).makespan == pytest.approx(50.25)
    assert peak_activations(program)[0] == pytest.approx((3 * group + 2 * 3 + 1) / 4)


@pytest.mark.parametrize(("group", "fix"), [(1, 4), (3, 4), (9, 8), (0, 4), (-2, 4)])
def test_a_group_outside_its_range_is_refused_with_the_nearest_one(group, fix):
    with pytest.raises(PlanError) as error:
        compiled(4, 8, 2, group)
    assert str(error.value) == (
        f"schedule.group={group}: interleaved_1f1b needs pp <= group <= num_microbatches, here "
        f"4 to 8. Try schedule.group={fix}."
    )


def test_with_fewer_microbatches_than_ranks_the_range_turns_around():
    assert peak_activations(compiled(4, 2, 2, 3))[0] == 2
    with pytest.raises(PlanError, match="here 2 to 4"):
        compiled(4, 2, 2, 5)


def test_a_rank_without_a_stage_is_refused():
    with pytest.raises(PlanError) as error:
        compiled(2, 2, 0)
    assert str(error.value) == (
        "schedule.stages_per_rank=0: a rank holds at least 1 stage. Try schedule.stages_per_rank=2."
    )
