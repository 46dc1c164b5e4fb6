import pytest

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.errors import PlanError
from tests.strategies.programs import compute_texts, lines


def picture(pp, num_microbatches):
    program = compile_program(schedule="gpipe", pp=pp, num_microbatches=num_microbatches)
    return lines(draw(simulate(program, UniformCosts())))


def test_all_forwards_stand_before_all_backwards():
    assert picture(2, 3) == lines(
        """
        rank 0 | 0F0 0F1 0F2  .   .   .  0B0  -  0B1  -  0B2  -
        rank 1 |  .  1F0 1F1 1F2 1B0  -  1B1  -  1B2  -   .   .
        """
    )


def test_fewer_microbatches_than_ranks():
    assert picture(4, 2) == lines(
        """
        rank 0 | 0F0 0F1  .   .   .   .   .   .   .   .   .  0B0  -  0B1  -
        rank 1 |  .  1F0 1F1  .   .   .   .   .   .  1B0  -  1B1  -   .   .
        rank 2 |  .   .  2F0 2F1  .   .   .  2B0  -  2B1  -   .   .   .   .
        rank 3 |  .   .   .  3F0 3F1 3B0  -  3B1  -   .   .   .   .   .   .
        """
    )


def test_one_rank_has_no_bubble():
    program = compile_program(schedule="gpipe", pp=1, num_microbatches=3)
    assert compute_texts(program) == ["0F0 0F1 0F2 0B0 0B1 0B2"]
    assert simulate(program, UniformCosts()).bubble_ratio == pytest.approx(0)


@pytest.mark.parametrize("backward", [1.0, 2.0, 2.5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("pp", [1, 2, 4, 7])
def test_the_papers_bubble_and_memory(pp, microbatches, backward):
    program = compile_program(schedule="gpipe", pp=pp, num_microbatches=microbatches)
    costs = UniformCosts(backward=backward)
    figures = measure(simulate(program, costs), costs)
    assert figures.makespan == pytest.approx((microbatches + pp - 1) * (1 + backward))
    assert figures.bubble_ratio == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert figures.gap_to_ideal == pytest.approx((pp - 1) / microbatches)
    assert figures.bound_gap == pytest.approx(0)
    assert peak_activations(program) == (microbatches,) * pp


def test_it_has_no_virtual_stages():
    with pytest.raises(PlanError) as error:
        compile_program(schedule="gpipe", pp=2, num_microbatches=2, stages_per_rank=2)
    assert str(error.value) == (
        "schedule.stages_per_rank=2: gpipe runs 1 per rank. Try schedule.stages_per_rank=1, or "
        "schedule=interleaved_1f1b schedule.stages_per_rank=2."
    )


def test_no_rank_at_all_is_refused():
    with pytest.raises(PlanError) as error:
        compile_program(schedule="gpipe", pp=0, num_microbatches=2)
    assert str(error.value) == "pp=0 is not a number of ranks. Try pp=1."
