import pytest

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import measure
from strategies.errors import PlanError
from tests.strategies.programs import compute_texts, lines


def picture(pp, num_microbatches):
    program = compile_program(schedule="1f1b", pp=pp, num_microbatches=num_microbatches)
    return lines(draw(simulate(program, UniformCosts())))


def test_the_papers_figure():
    assert picture(4, 4) == lines(
        """
        rank 0 | 0F0 0F1 0F2 0F3  .   .   .   .   .   .  0B0  -   .  0B1  -   .  0B2  -   .  0B3  -
        rank 1 |  .  1F0 1F1 1F2  .   .   .   .  1B0  -  1F3 1B1  -   .  1B2  -   .  1B3  -   .   .
        rank 2 |  .   .  2F0 2F1  .   .  2B0  -  2F2 2B1  -  2F3 2B2  -   .  2B3  -   .   .   .   .
        rank 3 |  .   .   .  3F0 3B0  -  3F1 3B1  -  3F2 3B2  -  3F3 3B3  -   .   .   .   .   .   .
        """
    )


def test_fewer_microbatches_than_ranks():
    assert picture(4, 2) == lines(
        """
        rank 0 | 0F0 0F1  .   .   .   .   .   .   .   .  0B0  -   .  0B1  -
        rank 1 |  .  1F0 1F1  .   .   .   .   .  1B0  -   .  1B1  -   .   .
        rank 2 |  .   .  2F0 2F1  .   .  2B0  -   .  2B1  -   .   .   .   .
        rank 3 |  .   .   .  3F0 3B0  -  3F1 3B1  -   .   .   .   .   .   .
        """
    )


def test_one_rank_alternates_from_the_start():
    program = compile_program(schedule="1f1b", pp=1, num_microbatches=3)
    assert compute_texts(program) == ["0F0 0B0 0F1 0B1 0F2 0B2"]


def test_four_ranks_and_eight_microbatches_take_33():
    program = compile_program(schedule="1f1b", pp=4, num_microbatches=8)
    figures = measure(simulate(program, UniformCosts()), UniformCosts())
    assert figures.makespan == 33
    assert figures.peak_activations == (4, 3, 2, 1)


@pytest.mark.parametrize("backward", [1.0, 2.0, 2.5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("pp", [1, 2, 4, 7])
def test_the_papers_bubble_and_memory(pp, microbatches, backward):
    program = compile_program(schedule="1f1b", pp=pp, num_microbatches=microbatches)
    costs = UniformCosts(backward=backward)
    figures = measure(simulate(program, costs), costs)
    assert figures.makespan == pytest.approx((microbatches + pp - 1) * (1 + backward))
    assert figures.bubble_ratio == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert peak_activations(program) == tuple(min(pp - rank, microbatches) for rank in range(pp))


@pytest.mark.parametrize("microbatches", [8, 16])
def test_latency_puts_it_above_the_bound(microbatches):
    """Each forward-backward pair of a rank waits for the round trip to the next."""
    program = compile_program(schedule="1f1b", pp=4, num_microbatches=microbatches)
    costs = UniformCosts(p2p=0.25)
    figures = measure(simulate(program, costs), costs)
    assert 0.07 < figures.bound_gap < 0.095


def test_it_has_no_virtual_stages():
    with pytest.raises(PlanError) as error:
        compile_program(schedule="1f1b", pp=2, num_microbatches=2, stages_per_rank=3)
    assert str(error.value) == (
        "schedule.stages_per_rank=3: 1f1b runs 1 per rank. Try schedule.stages_per_rank=1, or "
        "schedule=interleaved_1f1b schedule.stages_per_rank=3."
    )


def test_it_has_no_groups():
    with pytest.raises(PlanError, match=r"schedule\.group=4: 1f1b has no groups of microbatches"):
        compile_program(schedule="1f1b", pp=2, num_microbatches=4, group=4)
