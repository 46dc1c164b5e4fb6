import pytest

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.ir import Kind
from tests.strategies.programs import compute_texts, lines

# What the published code runs, stage = rank + chunk * pp; REDUCE where it starts an all-reduce.
P4_V2_M8 = """
0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1
0B2 0B3 4B4 4B5 4B6 4B7 4REDUCE0 0B4 0B5 0B6 0B7 0REDUCE0

1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2
5F7 1B3 5B4 5B5 5B6 5B7 5REDUCE0 1B4 1B5 1B6 1B7 1REDUCE0

2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3
6F6 6B4 6F7 6B5 6B6 6B7 6REDUCE0 2B4 2B5 2B6 2B7 2REDUCE0

3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4
7F5 7B5 7F6 7B6 7F7 7B7 7REDUCE0 3B4 3B5 3B6 3B7 3REDUCE0
"""
P2_V2_M4 = """
0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 2REDUCE0 0B2 0B3 0REDUCE0

1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 3REDUCE0 1B2 1B3 1REDUCE0
"""


def compiled(pp, num_microbatches, stages_per_rank=2):
    return compile_program(
        schedule="foldx_fifo",
        pp=pp,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )


@pytest.mark.parametrize(
    ("pp", "microbatches", "published", "peaks"),
    [(4, 8, P4_V2_M8, (11, 9, 7, 5)), (2, 4, P2_V2_M4, (5, 3))],
)
def test_compute_and_reductions_stand_as_in_the_published_code(pp, microbatches, published, peaks):
    program = compiled(pp, microbatches)
    rows = [
        " ".join(str(item) for item in row if item.kind is not Kind.STEP)
        for row in program.compute_rows()
    ]
    assert rows == [" ".join(block.split()) for block in published.strip().split("\n\n")]
    assert tuple(2 * peak for peak in peak_activations(program)) == peaks


def test_reductions_run_under_the_backwards_of_earlier_stages():
    timeline = simulate(compiled(2, 4), UniformCosts(grad_reduce=4))
    assert lines(draw(timeline)) == lines(
        """
        rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0  -  0F3 2B1  -  2F2 0B0  -  2F3 0B1
        comm 0 |  .   .   .   .   .   .   .   .   .   .   .   .   .   .   .   .
        rank 1 |  .  1F0 1F1 3F0 3B0  -  3F1 3B1  -  1F2 1B0  -  1F3 1B1  -  3F2
        comm 1 |  .   .   .   .   .   .   .   .   .   .   .   .   .   .   .   .

        rank 0 |  -   .  2B2  -   .  2B3  -  0B2  -  0B3  -   .   .   .   .
        comm 0 |  .   .   .   .   .   .   .  2.0  -   -   -  0.0  -   -   -
        rank 1 | 3B2  -  3F3 3B3  -  1B2  -  1B3  -   .   .   .   .   .   .
        comm 1 |  .   .   .   .   .  3.0  -   -   -  1.0  -   -   -   .   .
        """
    )


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_up_to_pp_microbatches_all_forwards_run_first(microbatches):
    for row in compute_texts(compiled(4, microbatches)):
        kinds = "".join(name[1] for name in row.split())
        assert kinds == "F" * 2 * microbatches + "B" * 2 * microbatches
    assert peak_activations(compiled(4, microbatches)) == (microbatches,) * 4


@pytest.mark.parametrize("reduce", [0, 5, 12, 40])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_closed_form_of_time_and_memory(pp, stages, rounds, reduce):
    microbatches = rounds * pp
    program = compiled(pp, microbatches, stages)
    hidden = (stages - 1) * pp * 2 / stages
    expected = microbatches * 3 + (pp - 1) * 3 / stages + max(reduce / stages, reduce - hidden)
    assert simulate(program, UniformCosts(grad_reduce=reduce)).makespan == pytest.approx(expected)
    units = [
        stages * microbatches
        if rounds == 1
        else min(stages * microbatches, 2 * (pp - 1 - rank) + (stages - 1) * pp + 1)
        for rank in range(pp)
    ]
    assert peak_activations(program) == pytest.approx(tuple(unit / stages for unit in units))
