"""What ``recompute=optimal`` finds, against bounds and an exact solver."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.bounds import memory_bound
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_compute
from strategies.errors import PlanError
from strategies.ir import Kind, verify
from strategies.ir.program import bidirectional, loop, v
from strategies.passes.recompute import optimal
from strategies.passes.recompute.local_search import makespan
from strategies.passes.recompute.optimal import recompute_to_fit, recompute_within
from strategies.passes.recompute.starts import sibling_orders
from strategies.plan import Plan, Recompute, ScheduleFile
from strategies.schedules import SCHEDULES
from tests.strategies.passes.recompute.test_mario import bare
from tests.strategies.programs import (
    ALL_SCHEDULES,
    legal_microbatches,
    texts,
    uneven_costs,
    written,
)

COSTS = UniformCosts()
LINKED = UniformCosts(p2p=0.05)


def full(*case):
    """One more of a kind: in the full matrix."""
    return pytest.param(*case, marks=pytest.mark.full)


def found(pp, microbatches, cap, *, costs=COSTS, **options):
    program = compile_program(
        pp=pp,
        num_microbatches=microbatches,
        recompute=Recompute("optimal", max_full_activations=cap),
        costs=costs,
        **options,
    )
    assert max(peak_activations(program)) <= cap + 1e-9
    return simulate(program, costs).makespan


@pytest.mark.parametrize(
    ("pp", "microbatches", "cap", "split", "wanted"),
    [
        (4, 4, 1, False, 21),
        full(4, 8, 1, False, 36),
        (4, 8, 2, False, 33),
        (8, 8, 1, False, 48),
        full(8, 8, 2, False, 45),
        full(4, 4, 1, True, 19),
        (4, 4, 4, True, 15),
        full(4, 8, 4, True, 27),
    ],
)
def test_the_proven_optima_of_1f1b(pp, microbatches, cap, split, wanted):
    assert found(pp, microbatches, cap, split_backward=split) == wanted


@pytest.mark.parametrize(
    ("pp", "microbatches", "cap", "split", "best"),
    [
        full(4, 16, 1, False, 66),
        full(4, 16, 2, False, 60),
        full(4, 16, 3, False, 57),
        (4, 4, 2, True, 17),
        full(4, 4, 3, True, 16),
        full(4, 8, 1, True, 34),
        full(4, 8, 2, True, 30),
        full(8, 8, 1, True, 42),
    ],
)
def test_other_caps_stay_within_three_percent_of_the_best_known(pp, microbatches, cap, split, best):
    assert best <= found(pp, microbatches, cap, split_backward=split) <= 1.03 * best


def test_the_first_microbatch_is_kept_where_one_activation_fits():
    program = compile_program(
        pp=4, num_microbatches=4, recompute=Recompute("optimal", max_full_activations=1)
    )
    again = [sum(item.kind is Kind.R for item in row) for row in program.ranks]
    assert again == [3, 3, 3, 0]


def test_two_stages_per_rank_and_a_split_backward_reach_the_proven_optimum():
    assert found(4, 4, 1, schedule="zb_v") == 17.5


# Proven by the solver below in minutes, or best known.
@pytest.mark.parametrize(
    ("schedule", "cap", "best"),
    [
        ("zb_v", 2, 15.5),
        full("interleaved_1f1b", 2, 17),
        full("chimera", 2, 18),
        full("hanayo", 2, 20),
        full("zb_h1", 2, 17),
    ],
)
def test_other_schedules_stay_within_three_percent_of_the_best_known(schedule, cap, best):
    assert best <= found(4, 4, cap, schedule=schedule) <= 1.03 * best


# Found by the solver below in 100 s, not proven; and what the search finds.
@pytest.mark.parametrize(
    ("schedule", "cap", "best", "wanted"),
    [full("zb_v", 2, 28.0, 29.0), full("zb_v", 3, 25.5, 26.5), ("hanayo", 2, 32.0, 33.0)],
)
def test_ranks_with_two_stages_come_close_to_what_a_solver_finds(schedule, cap, best, wanted):
    assert best <= found(4, 8, cap, schedule=schedule) <= wanted


def exact_cases():
    for pp, microbatches in ((2, 4), (3, 5), (4, 4), (4, 6), (4, 8)):
        for cap in range(1, pp):
            for split in (False, True):
                yield "1f1b", loop(pp, 1), microbatches, cap, split
    yield "chimera", bidirectional(4), 4, 1, False
    yield "zb_v", v(4), 4, 1, True
    yield "interleaved_1f1b", loop(4, 2), 4, 1, False


SHORT = {("1f1b", 3, 5, 1, False), ("1f1b", 4, 4, 2, True), ("chimera", 4, 4, 1, False)}


@pytest.mark.parametrize(
    ("schedule", "placement", "microbatches", "cap", "split"),
    [
        pytest.param(
            *case,
            marks=[] if (case[0], case[1].num_ranks, *case[2:]) in SHORT else [pytest.mark.full],
            id="-".join(map(str, (case[0], case[1].num_ranks, *case[2:]))),
        )
        for case in exact_cases()
    ],
)
def test_it_is_within_three_percent_of_an_exact_solver(
    schedule, placement, microbatches, cap, split
):
    exact = pytest.importorskip("tests.strategies.passes.recompute.exact")
    share = round(placement.stages_per_microbatch)
    # Whole numbers for the solver: with two stages per rank F takes 1 on each of them.
    costs = UniformCosts(forward=share, backward=2 * share)
    best = exact.solve(placement, microbatches, room=cap * share, split=split, seconds=60)
    own = split and not SCHEDULES[schedule].splits_backward
    time_taken = found(
        placement.num_ranks, microbatches, cap, costs=costs, schedule=schedule, split_backward=own
    )
    assert best.bound <= time_taken
    assert time_taken <= 1.03 * best.makespan


@settings(max_examples=settings.default.max_examples // 6)
@given(st.data())
def test_any_schedule_under_any_cap_and_costs_stays_whole_and_above_the_bound(data):
    schedule = data.draw(st.sampled_from(sorted(set(ALL_SCHEDULES) - {"foldx"})))
    entry = SCHEDULES[schedule]
    pp = 2 * data.draw(st.integers(1, 2))
    microbatches = legal_microbatches(schedule, pp, data.draw(st.integers(1, 8)))
    costs = data.draw(st.none() | uneven_costs()) or COSTS
    split = not entry.splits_backward and data.draw(st.booleans())
    plain = compile_compute(Plan(schedule, pp, microbatches, split_backward=split, costs=costs))
    share = 1 / plain.placement.stages_per_microbatch
    cap = share * data.draw(st.integers(1, 6))
    program = compile_program(
        schedule=schedule,
        pp=pp,
        num_microbatches=microbatches,
        split_backward=split,
        costs=costs,
        buckets=0,
        recompute=Recompute("optimal", max_full_activations=cap),
    )
    assert verify(program) is program
    assert max(peak_activations(program)) <= cap + 1e-9
    compute = program.with_ranks(
        tuple(tuple(i for i in row if i.microbatch is not None) for row in program.compute_rows())
    )
    if not any(p.kind in (Kind.I, Kind.B) for row in plain.ranks for i in row for p in i.halves):
        assert len({i.kind for r in plain.ranks for i in r} & {Kind.B, Kind.I}) == 2 or bare(
            compute
        ) == bare(plain)
    table = costs.table(program)
    bound = memory_bound(program, table, (cap,) * pp)
    assert simulate(program, costs).makespan >= bound.value * (1 - 1e-9)


def test_equal_plans_give_equal_programs():
    first, second = (
        compile_compute(
            Plan("1f1b", 4, 4, split_backward=True, recompute=Recompute("optimal", 4, 2.0))
        )
        for _ in range(2)
    )
    assert first == second


def test_a_schedule_that_fits_is_left_as_it_is():
    plain = compile_compute(Plan("1f1b", 4, 8))
    assert compile_compute(Plan("1f1b", 4, 8, recompute=Recompute("optimal", 4, 4.0))) == plain


def test_an_order_from_a_file_is_kept_and_recomputed_in_as_little_as_fits():
    text = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
    program = compile_program(
        schedule="custom",
        pp=2,
        file=ScheduleFile("my.csv", text),
        recompute=Recompute("optimal", max_full_activations=2),
    )
    rows = [[str(i) for i in row if i.microbatch is not None] for row in program.compute_rows()]
    assert rows[0] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0R2", "0B2"]


def test_an_order_from_a_file_that_cannot_fit_says_what_it_takes():
    text = "0F0,0I0,0F1,0I1,0W0,0W1\n"
    with pytest.raises(PlanError, match=r"2 backwards under way .*max_full_activations=2\.$"):
        compile_program(
            schedule="custom",
            pp=1,
            file=ScheduleFile("my.csv", text),
            recompute=Recompute("optimal", max_full_activations=1),
        )


def test_nothing_is_recomputed_where_all_fits():
    program = compile_compute(Plan("1f1b", 4, 8))
    assert recompute_to_fit(program, (4, 3, 2, 1)) == program


def test_the_pair_whose_backward_comes_last_gives_its_place_up():
    program = written("0F0 0F1 0F2 0B0 0B1 0B2", num_microbatches=3)
    found = recompute_to_fit(program, (2,))
    assert texts(verify(found)) == ["0F0 0F1 0F2 0B0 0B1 0R2 0B2"]
    assert peak_activations(found) == (2,)


def test_a_split_backward_holds_until_its_w():
    program = written("0F0 0I0 0F1 0I1 0W0 0W1", num_microbatches=2)
    assert recompute_to_fit(program, (1,)) is None
    tight = written("0F0 0F1 0I0 0W0 0I1 0W1", num_microbatches=2)
    assert texts(recompute_to_fit(tight, (1,))) == ["0F0 0F1 0I0 0W0 0R1 0I1 0W1"]


def siblings(schedule, pp=4, microbatches=8, **options):
    program = compile_compute(Plan(schedule, pp, microbatches, **options))
    return program, sibling_orders(program)


@pytest.mark.parametrize(
    ("schedule", "count"),
    [("zb_v", 2), ("interleaved_1f1b", 3), ("1f1b", 2), ("zb_h1", 1), ("hanayo", 0),
     ("chimera", 0), ("dualpipe", 0)],
)  # fmt: skip
def test_they_run_the_same_instructions_on_the_same_ranks(schedule, count):
    program, found = siblings(schedule)
    assert len(found) == count
    for other in found:
        assert verify(other) is other
        assert other.placement == program.placement
        assert other.ranks != program.ranks
        for mine, theirs in zip(program.ranks, other.ranks, strict=True):
            assert sorted(map(str, mine)) == sorted(map(str, theirs))
            assert len(mine) == len(theirs)


def test_a_split_program_has_split_siblings_only():
    _, found = siblings("1f1b", split_backward=True)
    assert len(found) == 1
    assert all(item.kind.name in "FIW" for row in found[0].ranks for item in row)


def fails(shape):
    raise KeyError(shape.pp)


def test_a_registered_schedule_is_a_sibling_and_one_that_cannot_serve_is_none(monkeypatch):
    program, others = siblings("1f1b", 2, 3)
    backwards = written("0F0 0F1 0F2 0B2 0B1 0B0\n1F0 1F1 1F2 1B2 1B1 1B0", num_microbatches=3)
    for name, order in {
        "newest_first": lambda shape: backwards.ranks,
        "stuck": lambda shape: tuple(row[::-1] for row in backwards.ranks),
        "nothing": lambda shape: None,
        "fails": fails,
    }.items():
        monkeypatch.setitem(SCHEDULES, name, replace(SCHEDULES["1f1b"], name=name, order=order))
    assert sibling_orders(program) == [*others, program.with_ranks(backwards.ranks)]


def test_one_order_more_never_makes_the_step_longer(monkeypatch):
    """Where what is fastest at first, a sibling, is not what the search makes fastest."""
    program = compile_compute(Plan("zb_v", 4, 4, costs=LINKED))
    table, others = LINKED.table(program), sibling_orders(program)

    def step(orders):
        monkeypatch.setattr(optimal, "sibling_orders", lambda program: orders)
        return makespan(recompute_within(program, table, (6,) * 4), table)

    alone = step([])
    assert len(others) == 2
    assert step(others) <= min(step(others[:1]), step(others[1:]))
    assert max(step(others[:1]), step(others[1:])) <= alone


# Step time over the step without recomputation, in percent: what is found, and one more.
@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "cap", "most"),
    [
        full("1f1b", 4, 16, 1, 16.1),
        full("1f1b", 4, 16, 2, 6.5),
        full("1f1b", 8, 32, 1, 19.4),
        ("1f1b", 8, 32, 4, 5.0),
        full("zb_h1", 4, 16, 1, 27.2),
        full("zb_h1", 4, 16, 2, 14.0),
        ("zb_v", 4, 16, 1, 28.8),
        full("zb_v", 4, 16, 2, 14.2),
        full("v_half", 4, 16, 1, 23.5),
        full("v_half", 4, 16, 2, 9.5),
    ],
)
def test_a_cap_lengthens_the_step_by_no_more_than_this(schedule, pp, microbatches, cap, most):
    plain = compile_compute(Plan(schedule, pp, microbatches, costs=LINKED))
    table = LINKED.table(plain)
    room = (round(cap * plain.placement.stages_per_microbatch),) * pp
    found = recompute_within(plain, table, room)
    assert 100 * (makespan(found, table) / makespan(plain, table) - 1) <= most
