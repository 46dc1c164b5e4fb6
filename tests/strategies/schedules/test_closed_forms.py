"""All schedules against the formulas of their papers, against the bound, and at their limits.

Time is in F of a rank; B is 2 and its halves are 1 unless costs are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, simulate
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_plan
from strategies.ir.kinds import Kind
from strategies.ir.text import format_rows, parse_rows
from strategies.plan import Plan
from strategies.schedules import SCHEDULES
from strategies.simulator.engine import unroll
from tests.strategies.programs import ALL_SCHEDULES, compute_texts, legal_microbatches
from tests.strategies.schedules.dual import PAIRED, without_pairs
from tests.strategies.schedules.figures import COMPILED_FOR_COSTS, compiled, figures, refused

# F and B; the halves of B are equal.
ANY_COSTS = ((1.0, 1.0), (1.0, 2.0), (1.0, 2.5), (1.0, 3.0), (2.0, 4.0))
TWO_COSTS = ((1.0, 2.0), (1.0, 3.0))
EQUAL_COSTS = ((1.0, 2.0),)


@dataclass(frozen=True)
class Paper:
    """What is known of a schedule.

    Attributes:
        shapes: (P, M, V).
        above: Time above M(F+B), from P, M, V, F and B.
        peaks: Microbatches held by each rank, or by the worst (a number), from P, M and V.
        costs: (F, B) for which that is the time.
        on_the_bound: No order within its memory is faster.
        dense: A step begins on each rank when the work of one is over.
    """

    shapes: list[tuple[int, int, int]]
    above: Callable[[int, int, int, float, float], float]
    peaks: Callable[[int, int, int], tuple[float, ...] | float]
    costs: tuple[tuple[float, float], ...] = ANY_COSTS
    on_the_bound: bool = True
    dense: bool = False


def rounds(ranks, stages, counts):
    return [(pp, count * pp, v) for pp, v, count in product(ranks, stages, counts)]


def warmed_up(ranks, v):
    """From the shortest step that fills the paper's warm-up on."""
    return [(pp, 2 * pp - 1 + more, v) for pp in ranks for more in (0, 1, 2, 9, 2 * pp + 1)]


ONE_STAGE = [(pp, m, 1) for pp, m in product((1, 2, 4, 7, 8), (1, 3, 8, 16, 17, 24))]


def full_bubble(p, m, v, f, b):
    return (p - 1) * (f + b) / v


PAPERS = {
    "naive": Paper(
        [(pp, m, v) for pp, m, v in product((1, 2, 5), (1, 2, 7), (1, 2, 3))],
        lambda p, m, v, f, b: m * (p - 1) * (f + b),
        lambda p, m, v: (1,) * p,
        on_the_bound=False,
    ),
    "gpipe": Paper(ONE_STAGE, full_bubble, lambda p, m, v: (m,) * p),
    "1f1b": Paper(
        ONE_STAGE, full_bubble, lambda p, m, v: tuple(min(p - rank, m) for rank in range(p))
    ),
    "eager_1f1b": Paper(
        ONE_STAGE,
        full_bubble,
        lambda p, m, v: tuple(min(2 * (p - rank) - 1, m) for rank in range(p)),
    ),
    "interleaved_1f1b": Paper(
        [*rounds((1, 2, 4, 5), (1, 2, 3, 4), (1, 2, 3)), *rounds((8,), (2,), (2, 3))],
        full_bubble,
        lambda p, m, v: tuple(
            min(v * m, 2 * (p - 1 - rank) + (v - 1) * p + 1) / v for rank in range(p)
        ),
        costs=TWO_COSTS,
    ),
    "looped_bfs": Paper(
        [*rounds((1, 2, 4), (1, 2, 3, 4), (1, 2, 3)), *rounds((8,), (2,), (2, 3)), (8, 8, 4)],
        full_bubble,
        lambda p, m, v: (m,) * p,
        costs=TWO_COSTS,
    ),
    "foldx_aiao": Paper(
        [*rounds((2, 4, 8), (2,), (2, 3)), (2, 5, 2), (4, 9, 2), (8, 17, 2)],
        full_bubble,
        lambda p, m, v: (m,) * p,
        on_the_bound=False,
    ),
    "foldx_fifo": Paper(
        rounds((2, 4, 8), (2,), (2, 3)),
        full_bubble,
        lambda p, m, v: p + (p - 1) / v,
        on_the_bound=False,
    ),
    "hanayo": Paper(
        rounds((2, 4, 8), (2,), (1, 2, 3, 4)),
        lambda p, m, v, f, b: (p - 1) * b,
        lambda p, m, v: p,
        costs=EQUAL_COSTS,
        on_the_bound=False,
    ),
    "zb_h1": Paper(
        [*rounds((1, 2, 4, 8), (1,), (1, 2, 4)), (2, 5, 1), (4, 9, 1), (8, 17, 1)],
        lambda p, m, v, f, b: p - 1,
        lambda p, m, v: (p,) * p,
        costs=EQUAL_COSTS,
    ),
    "zb_h2": Paper(
        warmed_up((1, 2, 4, 8), 1),
        lambda p, m, v, f, b: p - 1,
        lambda p, m, v: (2 * p - 1,) * p,
        costs=EQUAL_COSTS,
        dense=True,
    ),
    "zb_v": Paper(
        warmed_up((1, 2, 4, 8), 2),
        lambda p, m, v, f, b: (p - 1) / 2,
        lambda p, m, v: (p,) * p,
        costs=EQUAL_COSTS,
        dense=True,
    ),
    "interleaved_zb": Paper(
        [*rounds((1, 2, 4), (2, 3, 4), (1, 2, 3)), *rounds((8,), (2,), (1, 2, 3)), (8, 8, 4)],
        lambda p, m, v, f, b: (p - 1) / v,
        lambda p, m, v: (p,) * p,
        costs=EQUAL_COSTS,
    ),
}


def cases():
    return [
        pytest.param(name, pp, id=f"{name}-{pp}")
        for name, paper in PAPERS.items()
        for pp in dict.fromkeys(shape[0] for shape in paper.shapes)
    ]


@pytest.mark.parametrize(("name", "pp"), cases())
def test_time_and_memory_are_those_of_the_paper(name, pp):
    paper = PAPERS[name]
    for _, m, v in (shape for shape in paper.shapes if shape[0] == pp):
        for f, b in paper.costs:
            found = figures(name, pp, m, v, costs=UniformCosts(f, b))
            ideal, above = m * (f + b), paper.above(pp, m, v, f, b)
            assert found.makespan == pytest.approx(ideal + above)
            assert found.gap_to_ideal == pytest.approx(above / ideal)
            assert found.bubble_ratio == pytest.approx(above / (ideal + above))
            if paper.on_the_bound:
                assert found.bound_gap == pytest.approx(0, abs=1e-9)
        peaks = paper.peaks(pp, m, v)
        held = found.peak_activations
        assert (held if isinstance(peaks, tuple) else max(held)) == pytest.approx(peaks)


@pytest.mark.parametrize(
    ("name", "pp", "m"),
    [(name, *shape[:2]) for name, paper in PAPERS.items() if paper.dense for shape in paper.shapes],
)
def test_without_a_barrier_a_step_takes_the_work_of_one_rank(name, pp, m):
    """Every rank begins the next step one period later, while others still drain."""
    assert figures(name, pp, m).period == 3 * m
    steps = unroll(compiled(name, pp, m), UniformCosts(), steps=3)
    begun = [[min(row) for row in step.start] for step in steps]
    for before, after in pairwise(begun):
        assert [b - a for a, b in zip(before, after, strict=True)] == [3 * m] * pp


@pytest.mark.parametrize(
    ("pp", "f", "b"), [*((pp, *costs) for pp in (2, 4) for costs in ANY_COSTS[1:]), (8, 1.0, 2.0)]
)
def test_the_group_that_foldx_chooses_takes_the_time_of_interleaving(pp, f, b):
    for m in (2 * pp, 2 * pp + 1, *([3 * pp] if pp < 8 else [])):
        given_costs = UniformCosts(f, b)
        found = figures("foldx", pp, m, costs=given_costs, made_for=given_costs)
        expected = m * (f + b) + full_bubble(pp, m, 2, f, b)
        if m % pp:
            assert found.makespan >= expected - 1e-9
        else:
            assert found.makespan == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "pp", "m"), [(name, *shape) for name in PAIRED for shape in PAIRED[name].shapes]
)
def test_pairs_take_the_time_and_memory_of_the_report(name, pp, m):
    paired = PAIRED[name]
    for fused in (2.0, 2.5):
        costs = UniformCosts(fused=fused)
        found = figures(name, pp, m, costs=costs, made_for=costs)
        saved = paired.pairs(pp, m) * (3 - fused)
        expected = 3 * m - saved + paired.hops(pp) * (fused + 2 - 3)
        assert found.makespan == pytest.approx(expected)
        rows = compiled(name, pp, m, costs=costs).ranks
        assert parse_rows(format_rows(rows)) == rows
    apart = without_pairs(name, pp, m)
    makespan = simulate(apart, UniformCosts()).makespan
    assert makespan == pytest.approx(3 * m + paired.hops(pp))
    held = (pp + paired.spare,) * pp
    assert found.peak_activations == figures(name, pp, m).peak_activations == held
    assert peak_activations(apart) == held


@pytest.mark.parametrize(("name", "pp", "m"), [("dualpipe", 4, 10), ("dualpipe_v", 3, 7)])
def test_evaluation_runs_the_forwards_of_the_pairs(name, pp, m):
    programs = compile_plan(Plan(name, pp, m, costs=UniformCosts(fused=2.5)))
    for rank, row in enumerate(compute_texts(programs.forward)):
        parts = [part for item in programs.train.ranks[rank] for part in item.parts]
        assert row.split() == [str(part) for part in parts if part.kind is Kind.F]
    kinds = {item.kind for row in programs.accumulate.ranks for item in row}
    assert Kind.OVERLAP in kinds
    assert Kind.STEP not in kinds


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_a_last_round_that_is_not_full(pp):
    for f, b in ANY_COSTS:
        costs, m = UniformCosts(f, b), 2 * pp + 1
        expected = m * (f + b) + full_bubble(pp, m, 2, f, b)
        for name in ("interleaved_1f1b", "looped_bfs"):
            assert figures(name, pp, m, costs=costs).makespan == pytest.approx(expected)
        assert figures("foldx_fifo", pp, m, costs=costs).makespan >= expected - 1e-9


# Time above 3M, from P: their papers and ours give no formula for all P.
V_BUBBLES = {
    "v_half": {2: 0.5, 3: 2.5, 4: 2.5, 5: 5.5, 6: 5.5, 7: 8.5, 8: 8.5},
    "v_min": {2: 0.5, 3: 2.5, 4: 5.5, 5: 5.5, 6: 8.5, 7: 11.5, 8: 11.5},
}
# Most that a rank holds in a step of any length, from P, M, V and the group.
MOST = {
    "naive": lambda p, m, v, n: 1,
    "gpipe": lambda p, m, v, n: m,
    "1f1b": lambda p, m, v, n: min(p, m),
    "eager_1f1b": lambda p, m, v, n: min(2 * p - 1, m),
    "interleaved_1f1b": lambda p, m, v, n: min(m, (2 * (p - 1) + (v - 1) * n + 1) / v),
    "looped_bfs": lambda p, m, v, n: m,
    "foldx_fifo": lambda p, m, v, n: max(min(m, p), (2 * (p - 1) + (v - 1) * p + 1) / v),
    "foldx_aiao": lambda p, m, v, n: m,
    "foldx": lambda p, m, v, n: m,
    "chimera": lambda p, m, v, n: min(p, m),
    "hanayo": lambda p, m, v, n: min(p, m),
    "zb_h1": lambda p, m, v, n: min(p, m),
    "zb_h2": lambda p, m, v, n: min(2 * p - 1, m),
    "zb_v": lambda p, m, v, n: min(p, m),
    "interleaved_zb": lambda p, m, v, n: ((v - 1) * n + p) / v,
    "v_half": lambda p, m, v, n: min((p + 2) // 2, m),
    "v_min": lambda p, m, v, n: min((p + 4) // 3, m),
    "dualpipe": lambda p, m, v, n: p + 1,
    "dualpipe_v": lambda p, m, v, n: p + 0.5,
}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("name", "pp"), [(n, pp) for n in V_BUBBLES for pp in V_BUBBLES[n]])
def test_the_bubble_of_a_controlled_v_does_not_grow_with_the_microbatches(name, pp, count):
    found = figures(name, pp, count * pp)
    assert found.makespan == pytest.approx(3 * count * pp + V_BUBBLES[name][pp])
    assert max(found.peak_activations) <= MOST[name](pp, count * pp, 2, None)


def test_the_most_that_a_rank_holds_is_known_of_every_schedule():
    assert set(MOST) == set(ALL_SCHEDULES)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@settings(max_examples=12)
@given(
    pp=st.integers(1, 8),
    m=st.integers(1, 16),
    stages=st.integers(1, 4),
    equal=st.booleans(),
    forward=st.floats(0.2, 3),
    backward=st.floats(0.2, 5),
    latency=st.floats(0, 1),
    gain=st.floats(0.5, 1),
)
@example(8, 16, 2, True, 1.0, 2.0, 0.0, 1.0)
def test_any_shape_and_costs_stay_above_the_bound_and_within_the_memory(
    name, pp, m, stages, equal, forward, backward, latency, gain
):
    schedule = SCHEDULES[name]
    if schedule.weight_copies == 2:
        pp += pp % 2
    v = schedule.stages_per_rank
    if schedule.virtual_stages:
        v = 2 * min(stages, 2) if name == "hanayo" else stages
    m = legal_microbatches(name, pp, m, v)
    costs = UniformCosts()
    if not equal:
        pair = gain * (forward + backward)
        costs = UniformCosts(forward, backward, p2p=latency, fused=pair)
    group = schedule.resolve(Plan(schedule.name, pp, m, v)).group
    if schedule.chooses_group:
        group = group or max(min(pp, m), m // stages)
    for_costs = costs if name in COMPILED_FOR_COSTS else None
    found = figures(name, pp, m, v, group, costs=costs, made_for=for_costs)
    assert found.makespan >= found.lower_bound * (1 - 1e-9)
    assert found.period <= found.makespan + 1e-9
    assert max(found.peak_activations) <= MOST[name](pp, m, v, group) + 1e-9
    assert found.weight_copies == schedule.weight_copies


@pytest.mark.parametrize(
    ("name", "m", "stages", "row"),
    [
        ("naive", 2, 3, "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"),
        ("gpipe", 3, 1, "0F0 0F1 0F2 0B0 0B1 0B2"),
        ("1f1b", 3, 1, "0F0 0B0 0F1 0B1 0F2 0B2"),
        ("eager_1f1b", 2, 1, "0F0 0B0 0F1 0B1"),
        ("interleaved_1f1b", 2, 2, "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"),
        ("looped_bfs", 2, 1, "0F0 0F1 0B1 0B0"),
        ("hanayo", 1, 4, "0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0"),
        ("zb_h1", 2, 1, "0F0 0I0 0W0 0F1 0I1 0W1"),
        ("zb_h2", 2, 1, "0F0 0I0 0W0 0F1 0I1 0W1"),
        ("zb_v", 2, 2, "0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"),
        ("interleaved_zb", 2, 2, "0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"),
    ],
)
def test_one_rank(name, m, stages, row):
    assert compute_texts(compiled(name, 1, m, stages)) == [row]
    assert figures(name, 1, m, stages).makespan == pytest.approx(3 * m)


@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_one_rank_of_a_controlled_v_has_no_bubble(name):
    assert figures(name, 1, 3).makespan == 9
    assert figures(name, 1, 3).peak_activations == (1,)
    assert len(compute_texts(compiled(name, 1, 3))[0].split()) == 18


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "naive",
            (2, 0),
            "num_microbatches=0: naive needs at least 1 microbatch. Try num_microbatches=4.",
        ),
        (
            "naive",
            (2, 2, 1, 2),
            "schedule.group=2: naive has no groups of microbatches. "
            "Remove schedule.group, or try schedule=interleaved_1f1b.",
        ),
        (
            "1f1b",
            (2, 2, 3),
            "schedule.stages_per_rank=3: 1f1b runs 1 per rank. Try schedule.stages_per_rank=1, or "
            "schedule=interleaved_1f1b schedule.stages_per_rank=3.",
        ),
        ("1f1b", (2, 4, 1, 4), "schedule.group=4: 1f1b has no groups of microbatches"),
        ("eager_1f1b", (2, 2, 2), "schedule.stages_per_rank=2: eager_1f1b runs 1 per"),
        ("foldx_aiao", (2, 4, 2, 4), "schedule.group=4: foldx_aiao has no groups"),
        ("foldx_fifo", (2, 4, 2, 4), "schedule.group=4: foldx_fifo has no groups"),
        (
            "foldx",
            (4, 8, 2, 9),
            "schedule.group=9: foldx needs pp <= group <= num_microbatches, here 4 to 8. "
            "Try schedule.group=8.",
        ),
        *(
            (
                "interleaved_1f1b",
                (4, 8, 2, group),
                f"schedule.group={group}: interleaved_1f1b needs pp <= group <= num_microbatches, "
                f"here 4 to 8. Try schedule.group={fix}.",
            )
            for group, fix in ((1, 4), (3, 4), (9, 8), (0, 4), (-2, 4))
        ),
        (
            "interleaved_1f1b",
            (2, 2, 0),
            "schedule.stages_per_rank=0: a rank holds at least 1 stage. "
            "Try schedule.stages_per_rank=2.",
        ),
        ("interleaved_zb", (4, 16, 2, 3), "schedule.group=3: interleaved_zb needs pp <= group <="),
        *(
            (
                "hanayo",
                (2, 4, stages),
                f"schedule.stages_per_rank={stages}: each wave of hanayo crosses a rank twice, so "
                f"the number is even. Try schedule.stages_per_rank={stages + 1}.",
            )
            for stages in (1, 3, 5)
        ),
        (
            "chimera",
            (3, 8),
            "pp=3 is odd: chimera runs two opposed pipelines, which meet between two ranks. "
            "Try pp=2 or pp=4.",
        ),
        (
            "chimera",
            (4, 7),
            "num_microbatches=7: chimera gives half of the microbatches to each of two opposed "
            "pipelines and needs an even number. Try num_microbatches=6 or num_microbatches=8.",
        ),
        (
            "dualpipe",
            (4, 6),
            "num_microbatches=6: dualpipe gives half of the microbatches to each of two opposed "
            "pipelines and needs an even number >= 2 * pp = 8. Try num_microbatches=8.",
        ),
        (
            "dualpipe_v",
            (4, 7),
            "num_microbatches=7: dualpipe_v fills a V of 8 stages before its first fused pair and "
            "needs num_microbatches >= 2 * pp. Try num_microbatches=8.",
        ),
    ],
)
def test_a_shape_that_it_cannot_run_is_refused(name, shape, message):
    said = refused(name, *shape)
    assert said == message if message.endswith(".") else said.startswith(message)


@pytest.mark.parametrize(
    ("name", "pp", "m", "fix"),
    [
        ("chimera", 1, 3, "Try pp=2 num_microbatches=4."),
        ("chimera", 2, 1, "Try num_microbatches=2."),
        ("dualpipe", 4, 13, "Try num_microbatches=12 or num_microbatches=14."),
        ("dualpipe", 5, 10, "Try pp=4 or pp=6 num_microbatches=12."),
        ("dualpipe", 1, 2, "Try pp=2 num_microbatches=4."),
    ],
)
def test_the_nearest_shapes_are_named(name, pp, m, fix):
    assert refused(name, pp, m).endswith(fix)
