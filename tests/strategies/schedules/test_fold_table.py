"""When Fold wins: every figure of the comparison of reductions at the end and under compute.

F=1, B=2 per rank, 4 ranks, free messages, one bucket per stage, a whole reduction of A per rank.
"""

import pytest

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations

REDUCTIONS = (0, 8, 32)

# (V, M): 1F1B and GPipe, interleaved (both reduced at the end), fifo, aiao; peaks of rank 0.
TABLE = {
    (2, 8): ((33, 41, 65), (28.5, 36.5, 60.5), (28.5, 32.5, 56.5), (28.5, 32.5, 52.5)),
    (2, 16): ((57, 65, 89), (52.5, 60.5, 84.5), (52.5, 56.5, 80.5), (52.5, 56.5, 68.5)),
    (2, 32): (
        (105, 113, 137),
        (100.5, 108.5, 132.5),
        (100.5, 104.5, 128.5),
        (100.5, 104.5, 116.5),
    ),
    (4, 8): ((33, 41, 65), (26.25, 34.25, 58.25), (26.25, 28.25, 52.25), (26.25, 28.25, 46.25)),
    (4, 16): ((57, 65, 89), (50.25, 58.25, 82.25), (50.25, 52.25, 76.25), (50.25, 52.25, 58.25)),
    (4, 32): (
        (105, 113, 137),
        (98.25, 106.25, 130.25),
        (98.25, 100.25, 124.25),
        (98.25, 100.25, 106.25),
    ),
}
PEAKS = {2: (4, 5.5), 4: (4, 4.75)}
CELLS = sorted(TABLE)


def times(schedule, stages, microbatches, overlap, group=None):
    program = compile_program(
        schedule=schedule,
        pp=4,
        num_microbatches=microbatches,
        stages_per_rank=stages,
        overlap=overlap,
        group=group,
    )
    costs = [UniformCosts(grad_reduce=reduce) for reduce in REDUCTIONS]
    return tuple(simulate(program, cost).makespan for cost in costs)


def peak(schedule, stages, microbatches, group=None):
    program = compile_program(
        schedule=schedule,
        pp=4,
        num_microbatches=microbatches,
        stages_per_rank=stages,
        group=group,
    )
    return max(peak_activations(program))


@pytest.mark.parametrize(("stages", "microbatches"), CELLS)
def test_one_stage_per_rank_reduced_at_the_end(stages, microbatches):
    expected = TABLE[stages, microbatches][0]
    assert times("gpipe", 1, microbatches, "none") == expected
    assert times("1f1b", 1, microbatches, "none") == expected


@pytest.mark.parametrize(("stages", "microbatches"), CELLS)
def test_interleaved_reduced_at_the_end(stages, microbatches):
    expected = TABLE[stages, microbatches][1]
    assert times("interleaved_1f1b", stages, microbatches, "none") == expected
    assert times("foldx_fifo", stages, microbatches, "none") == expected


@pytest.mark.parametrize(("stages", "microbatches"), CELLS)
def test_fifo_is_interleaved_with_stages_reduced_as_they_get_ready(stages, microbatches):
    expected = TABLE[stages, microbatches][2]
    assert times("foldx_fifo", stages, microbatches, "grad_reduce") == expected
    assert times("interleaved_1f1b", stages, microbatches, "grad_reduce") == expected


@pytest.mark.parametrize(("stages", "microbatches"), CELLS)
def test_aiao_is_groups_of_all_microbatches(stages, microbatches):
    expected = TABLE[stages, microbatches][3]
    assert times("foldx_aiao", stages, microbatches, "grad_reduce") == expected
    grouped = times("interleaved_1f1b", stages, microbatches, "grad_reduce", group=microbatches)
    assert grouped == expected


@pytest.mark.parametrize(("stages", "microbatches"), CELLS)
def test_peaks(stages, microbatches):
    one, fifo = PEAKS[stages]
    assert peak("gpipe", 1, microbatches) == microbatches
    assert peak("1f1b", 1, microbatches) == one
    assert peak("interleaved_1f1b", stages, microbatches) == fifo
    assert peak("foldx_fifo", stages, microbatches) == fifo
    assert peak("foldx_aiao", stages, microbatches) == microbatches


@pytest.mark.parametrize(
    ("stages", "microbatches", "reduce", "group", "time", "held"),
    [(4, 32, 16, 8, 102.25, 7.75), (2, 16, 16, 8, 60.5, 7.5), (4, 32, 32, 16, 106.25, 13.75)],
)
def test_a_group_between_pp_and_m_has_the_time_of_aiao_and_less_memory(
    stages, microbatches, reduce, group, time, held
):
    costs = UniformCosts(grad_reduce=reduce)
    shape = {"pp": 4, "num_microbatches": microbatches, "stages_per_rank": stages}
    aiao = compile_program(schedule="foldx_aiao", **shape)
    program = compile_program(schedule="interleaved_1f1b", group=group, **shape)
    assert simulate(program, costs).makespan == simulate(aiao, costs).makespan == time
    assert max(peak_activations(program)) == held
    assert max(peak_activations(aiao)) == microbatches


def test_the_native_pipeline_with_groups_of_all_microbatches_holds_19_and_a_half():
    assert peak("interleaved_1f1b", 2, 32, group=32) == 19.5


def test_aiao_beats_fifo_only_where_a_reduction_outlasts_the_backwards_of_pp_microbatches():
    shape = {"pp": 4, "num_microbatches": 16, "stages_per_rank": 4}
    fifo = compile_program(schedule="foldx_fifo", **shape)
    aiao = compile_program(schedule="foldx_aiao", **shape)
    for reduce in (4, 8):
        costs = UniformCosts(grad_reduce=reduce)
        assert simulate(aiao, costs).makespan == simulate(fifo, costs).makespan
    costs = UniformCosts(grad_reduce=9)
    assert simulate(aiao, costs).makespan < simulate(fifo, costs).makespan


def test_buckets_alone_bring_interleaved_up_to_coarse_aiao_in_half_of_the_cells():
    """With reductions of A > 0: four buckets per stage against aiao's one."""
    better = 0
    for stages, microbatches in CELLS:
        shape = {"pp": 4, "num_microbatches": microbatches, "stages_per_rank": stages}
        bucketed = compile_program(schedule="interleaved_1f1b", buckets=4, **shape)
        coarse = compile_program(schedule="foldx_aiao", **shape)
        for reduce in (8, 32):
            costs = UniformCosts(grad_reduce=reduce)
            better += simulate(bucketed, costs).makespan < simulate(coarse, costs).makespan
    assert better == 6
