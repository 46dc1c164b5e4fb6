import pytest

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.ir import Kind
from tests.strategies.programs import lines

# What the published code runs, stage = rank + chunk * pp; REDUCE where it starts an all-reduce.
P4_V2_M8 = """
0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 4F0 4F1 4F2 4F3 4F4 4F5 4F6 4F7
4B0 4B1 4B2 4B3 4B4 4B5 4B6 4B7 4REDUCE0 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7 0REDUCE0

1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7 5F0 5F1 5F2 5F3 5F4 5F5 5F6 5F7
5B0 5B1 5B2 5B3 5B4 5B5 5B6 5B7 5REDUCE0 1B0 1B1 1B2 1B3 1B4 1B5 1B6 1B7 1REDUCE0

2F0 2F1 2F2 2F3 2F4 2F5 2F6 2F7 6F0 6F1 6F2 6F3 6F4 6F5 6F6 6F7
6B0 6B1 6B2 6B3 6B4 6B5 6B6 6B7 6REDUCE0 2B0 2B1 2B2 2B3 2B4 2B5 2B6 2B7 2REDUCE0

3F0 3F1 3F2 3F3 3F4 3F5 3F6 3F7 7F0 7F1 7F2 7F3 7F4 7F5 7F6 7F7
7B0 7B1 7B2 7B3 7B4 7B5 7B6 7B7 7REDUCE0 3B0 3B1 3B2 3B3 3B4 3B5 3B6 3B7 3REDUCE0
"""
P2_V2_M4 = """
0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 2REDUCE0 0B0 0B1 0B2 0B3 0REDUCE0

1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 3REDUCE0 1B0 1B1 1B2 1B3 1REDUCE0
"""


def compiled(pp, num_microbatches, stages_per_rank=2):
    return compile_program(
        schedule="foldx_aiao",
        pp=pp,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )


@pytest.mark.parametrize(("pp", "microbatches", "published"), [(4, 8, P4_V2_M8), (2, 4, P2_V2_M4)])
def test_compute_and_reductions_stand_as_in_the_published_code(pp, microbatches, published):
    program = compiled(pp, microbatches)
    rows = [
        " ".join(str(item) for item in row if item.kind is not Kind.STEP)
        for row in program.compute_rows()
    ]
    assert rows == [" ".join(block.split()) for block in published.strip().split("\n\n")]
    assert peak_activations(program) == (microbatches,) * pp


def test_reductions_run_under_the_backwards_of_earlier_stages():
    timeline = simulate(compiled(2, 2), UniformCosts(grad_reduce=4))
    assert lines(draw(timeline)) == lines(
        """
        rank 0 | 0F0 0F1 2F0 2F1  .   .   .  2B0  -  2B1  -  0B0  -  0B1  -   .   .   .   .
        comm 0 |  .   .   .   .   .   .   .   .   .   .   .  2.0  -   -   -  0.0  -   -   -
        rank 1 |  .  1F0 1F1 3F0 3F1 3B0  -  3B1  -  1B0  -  1B1  -   .   .   .   .   .   .
        comm 1 |  .   .   .   .   .   .   .   .   .  3.0  -   -   -  1.0  -   -   -   .   .
        """
    )


def test_any_number_of_microbatches_runs():
    assert lines(draw(simulate(compiled(2, 3), UniformCosts()))) == lines(
        """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2  .   .   .  2B0  -  2B1  -  2B2  -  0B0  -  0B1  -  0B2  -
        rank 1 |  .  1F0 1F1 1F2 3F0 3F1 3F2 3B0  -  3B1  -  3B2  -  1B0  -  1B1  -  1B2  -   .   .
        """
    )


@pytest.mark.parametrize("reduce", [0, 5, 12, 40])
@pytest.mark.parametrize("microbatches", [4, 6, 9])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_closed_form_of_time_and_memory(pp, stages, microbatches, reduce):
    program = compiled(pp, microbatches, stages)
    hidden = (stages - 1) * microbatches * 2 / stages
    expected = microbatches * 3 + (pp - 1) * 3 / stages + max(reduce / stages, reduce - hidden)
    assert simulate(program, UniformCosts(grad_reduce=reduce)).makespan == pytest.approx(expected)
    assert peak_activations(program) == pytest.approx((microbatches,) * pp)
