"""The whole family against the formulas of the papers, and against the bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import measure
from tests.strategies.programs import ALL_SCHEDULES, legal_microbatches

RATIOS = [(1.0, 1.0, 1.0), (1.0, 1.5, 1.5), (2.0, 2.0, 2.0)]

# Time above M(F+I+W), from P, V and F, I, W of a rank.
ABOVE_IDEAL = {
    "gpipe": lambda p, v, f, i, w: (p - 1) * (f + i + w),
    "1f1b": lambda p, v, f, i, w: (p - 1) * (f + i + w),
    "eager_1f1b": lambda p, v, f, i, w: (p - 1) * (f + i + w),
    "interleaved_1f1b": lambda p, v, f, i, w: (p - 1) * (f + i + w) / v,
    "looped_bfs": lambda p, v, f, i, w: (p - 1) * (f + i + w) / v,
    "foldx_fifo": lambda p, v, f, i, w: (p - 1) * (f + i + w) / v,
    "foldx_aiao": lambda p, v, f, i, w: (p - 1) * (f + i + w) / v,
    "foldx": lambda p, v, f, i, w: (p - 1) * (f + i + w) / v,
}
# With F = I = W.
ABOVE_IDEAL_EQUAL = ABOVE_IDEAL | {
    "zb_h1": lambda p, v, f, i, w: (p - 1) * (f + i - w),
    "zb_h2": lambda p, v, f, i, w: (p - 1) * f,
    "zb_v": lambda p, v, f, i, w: (p - 1) * f / 2,
}
# Peak of the worst rank in full-rank microbatches.
PEAK = {
    "gpipe": lambda p, v, m: m,
    "1f1b": lambda p, v, m: p,
    "eager_1f1b": lambda p, v, m: 2 * p - 1,
    "interleaved_1f1b": lambda p, v, m: p + (p - 1) / v,
    "looped_bfs": lambda p, v, m: m,
    "foldx_fifo": lambda p, v, m: p + (p - 1) / v,
    "foldx_aiao": lambda p, v, m: m,
    "zb_h1": lambda p, v, m: p,
    "zb_h2": lambda p, v, m: 2 * p - 1,
    "zb_v": lambda p, v, m: p,
    "v_half": lambda p, v, m: (p + 2) // 2,
    "v_min": lambda p, v, m: (p + 4) // 3,
    "dualpipe": lambda p, v, m: p + 1,
    "dualpipe_v": lambda p, v, m: p + 0.5,
}
ON_THE_BOUND = (
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "zb_h1",
    "zb_h2",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_v",
)


def figures(schedule, pp, microbatches, f=1.0, i=1.0, w=1.0, stages=None):
    costs = UniformCosts(forward=f, backward=i + w, backward_input=i)
    program = compile_program(
        schedule=schedule,
        pp=pp,
        num_microbatches=microbatches,
        stages_per_rank=stages,
        buckets=0,
        costs=costs,
    )
    return program, measure(simulate(program, costs), costs)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("schedule", sorted(ABOVE_IDEAL))
def test_unsplit_schedules_take_the_time_of_their_formula(schedule, pp):
    for f, i, w in RATIOS:
        for microbatches in (2 * pp, 2 * pp + 1, 3 * pp):
            program, found = figures(schedule, pp, microbatches, f, i, w)
            stages = program.placement.stages_per_rank
            expected = microbatches * (f + i + w) + ABOVE_IDEAL[schedule](pp, stages, f, i, w)
            if schedule in ("foldx_fifo", "foldx") and microbatches % pp:
                assert found.makespan >= expected - 1e-9
            else:
                assert found.makespan == pytest.approx(expected)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zb_v"])
def test_zero_bubble_schedules_take_the_time_of_their_formula(schedule, pp):
    for microbatches in (2 * pp, 2 * pp + 1, 4 * pp):
        _, found = figures(schedule, pp, microbatches)
        above = ABOVE_IDEAL_EQUAL[schedule](pp, 2, 1.0, 1.0, 1.0)
        assert found.makespan == pytest.approx(3 * microbatches + above)
        if schedule != "zb_h1":
            assert found.period == pytest.approx(3 * microbatches)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("schedule", ON_THE_BOUND)
def test_with_equal_costs_no_order_is_faster(schedule, pp):
    for microbatches in (2 * pp, 4 * pp):
        _, found = figures(schedule, pp, microbatches)
        assert found.bound_gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("schedule", sorted(PEAK))
def test_the_worst_rank_holds_what_the_formula_says(schedule, pp):
    microbatches = 2 * pp
    program, found = figures(schedule, pp, microbatches)
    expected = PEAK[schedule](pp, program.placement.stages_per_rank, microbatches)
    if schedule in ("v_half", "v_min", "dualpipe", "dualpipe_v"):
        assert max(found.peak_activations) <= expected
    else:
        assert max(found.peak_activations) == pytest.approx(expected)


@settings(max_examples=150)
@given(st.sampled_from(ALL_SCHEDULES), st.integers(1, 8), st.integers(1, 16))
def test_below_that_the_bound_holds(schedule, pp, microbatches):
    if schedule in ("chimera", "dualpipe"):
        pp += pp % 2
    microbatches = legal_microbatches(schedule, pp, microbatches)
    _, found = figures(schedule, pp, microbatches)
    assert found.makespan >= found.lower_bound - 1e-9
    assert found.period <= found.makespan + 1e-9
