from dataclasses import replace

import pytest

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_plan
from strategies.plan import Plan
from tests.strategies.programs import lines


def compiled(pp, num_microbatches, group, stages_per_rank=2, costs=None):
    return compile_program(
        schedule="foldx",
        pp=pp,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
        group=group,
        costs=costs,
    )


def test_three_microbatches_cross_all_stages_of_a_rank_before_the_next_three():
    program = compiled(2, 6, 3)
    assert lines(draw(simulate(program, UniformCosts()))) == lines(
        """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2  .  2B0  -  0F3 2B1  -  0F4 2B2  -  0F5 0B0  -
        rank 1 |  .  1F0 1F1 1F2 3F0 3B0  -  3F1 3B1  -  3F2 3B2  -  1F3 1B0  -  1F4 1B1

        rank 0 | 2F3 0B1  -  2F4 0B2  -  2F5 2B3  -   .  2B4  -   .  2B5  -  0B3  -  0B4  -  0B5  -
        rank 1 |  -  1F5 1B2  -  3F3 3B3  -  3F4 3B4  -  3F5 3B5  -  1B3  -  1B4  -  1B5  -   .   .
        """
    )


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("pp", [2, 4])
def test_the_ends_of_the_knob_are_fifo_and_all_in(pp, stages):
    microbatches = 4 * pp
    fifo = compile_program(
        schedule="foldx_fifo", pp=pp, num_microbatches=microbatches, stages_per_rank=stages
    )
    assert compiled(pp, microbatches, pp, stages).ranks == fifo.ranks
    costs = UniformCosts(grad_reduce=100)
    all_in = compile_program(
        schedule="foldx_aiao", pp=pp, num_microbatches=microbatches, stages_per_rank=stages
    )
    ours = compiled(pp, microbatches, microbatches, stages)
    assert simulate(ours, costs).makespan == pytest.approx(simulate(all_in, costs).makespan)


@pytest.mark.parametrize("reduction", [0, 8, 20, 60])
@pytest.mark.parametrize(("pp", "stages", "microbatches"), [(2, 2, 8), (4, 2, 16), (4, 4, 32)])
def test_time_and_peak_have_closed_forms_where_the_group_divides(
    pp, stages, microbatches, reduction
):
    for group in (pp, 2 * pp, microbatches):
        program = compiled(pp, microbatches, group, stages)
        costs = UniformCosts(grad_reduce=reduction)
        exposed = max(reduction / stages, reduction - (stages - 1) * group * 2 / stages)
        expected = 3 * microbatches + 3 * (pp - 1) / stages + exposed
        assert simulate(program, costs).makespan == pytest.approx(expected)
        peaks = [(2 * (pp - 1 - r) + (stages - 1) * group + 1) / stages for r in range(pp)]
        assert peak_activations(program) == tuple(min(p, microbatches) for p in peaks)


def test_memory_bounds_the_choice():
    class Heavy(UniformCosts):
        def table(self, program):
            stages = program.placement.num_stages
            return replace(
                UniformCosts.table(self, program),
                activation_bytes=(10,) * stages,
                state_bytes=(0,) * stages,
            )

    costs = Heavy(grad_reduce=60)
    free = compile_plan(Plan("foldx", 2, 16, 2, costs=costs)).choice
    tight = compile_plan(Plan("foldx", 2, 16, 2, costs=costs, memory_bytes=120)).choice
    impossible = compile_plan(Plan("foldx", 2, 16, 2, costs=costs, memory_bytes=10)).choice
    assert free.chosen.makespan < tight.chosen.makespan
    assert 20 * tight.chosen.peak <= 120 < 20 * free.chosen.peak
    assert tight.reason.endswith(
        f"{sum(not c.fits for c in tight.candidates)} above the memory limit"
    )
    assert impossible.group == 2
    assert impossible.reason.endswith("no group fits the memory limit, this one holds least")
