import pytest

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.errors import PlanError
from tests.strategies.programs import compute_texts, lines


def picture(pp, num_microbatches, stages_per_rank=1):
    program = compile_program(
        schedule="naive",
        pp=pp,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    return lines(draw(simulate(program, UniformCosts())))


def test_two_ranks_take_turns():
    assert picture(2, 2) == lines(
        """
        rank 0 | 0F0  .   .   .  0B0  -  0F1  .   .   .  0B1  -
        rank 1 |  .  1F0 1B0  -   .   .   .  1F1 1B1  -   .   .
        """
    )


def test_three_ranks_take_turns():
    assert picture(3, 2) == lines(
        """
        rank 0 | 0F0  .   .   .   .   .   .  0B0  -  0F1  .   .   .   .   .   .  0B1  -
        rank 1 |  .  1F0  .   .   .  1B0  -   .   .   .  1F1  .   .   .  1B1  -   .   .
        rank 2 |  .   .  2F0 2B0  -   .   .   .   .   .   .  2F1 2B1  -   .   .   .   .
        """
    )


def test_virtual_stages_are_crossed_in_order():
    assert picture(2, 1, stages_per_rank=2) == lines(
        """
        rank 0 | 0F0  .  2F0  .   .   .  2B0  -   .   .  0B0  -
        rank 1 |  .  1F0  .  3F0 3B0  -   .   .  1B0  -   .   .
        """
    )


def test_one_rank_runs_its_stages_one_microbatch_at_a_time():
    program = compile_program(schedule="naive", pp=1, num_microbatches=2, stages_per_rank=3)
    assert compute_texts(program) == ["0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 7])
@pytest.mark.parametrize("pp", [1, 2, 5])
def test_all_but_one_rank_is_always_idle(pp, microbatches, stages):
    program = compile_program(
        schedule="naive", pp=pp, num_microbatches=microbatches, stages_per_rank=stages
    )
    figures = measure(simulate(program, UniformCosts()), UniformCosts())
    assert figures.makespan == pytest.approx(microbatches * pp * 3)
    assert figures.bubble_ratio == pytest.approx(1 - 1 / pp)
    assert peak_activations(program) == pytest.approx((1,) * pp)


def test_it_needs_a_microbatch():
    with pytest.raises(PlanError) as error:
        compile_program(schedule="naive", pp=2, num_microbatches=0)
    assert str(error.value) == (
        "num_microbatches=0: naive needs at least 1 microbatch. Try num_microbatches=4."
    )


def test_it_has_no_groups():
    with pytest.raises(PlanError) as error:
        compile_program(schedule="naive", pp=2, num_microbatches=2, group=2)
    assert str(error.value) == (
        "schedule.group=2: naive has no groups of microbatches. "
        "Remove schedule.group, or try schedule=interleaved_1f1b."
    )
