"""Listed plans fit with everything that their programs hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from strategies.analysis.memory import peak_bytes, peak_memory_bytes
from strategies.compiler import compile_plan
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.kernels import Product, Work
from strategies.costs.load import Load
from strategies.plan import NO_RECOMPUTE, Recompute
from strategies.planner import outcome
from strategies.planner.group import Group, Sketch, expected_bytes, groups, groups_of, sketches
from strategies.planner.layout_search import dominating_candidates, rank_key, search
from strategies.planner.outcome import (
    Outcome,
    evaluate,
    least_bytes,
    least_time,
    program_of,
    program_step,
)
from strategies.planner.problem import Layout, Order, Problem
from strategies.planner.space import Space, degrees, layouts
from strategies.schedules import find_schedule
from strategies.simulator.engine import simulate
from tests.strategies.planner.models import problem, with_memory


def test_a_plan_that_fits_only_without_its_buffers_makes_room_for_the_next():
    asked, space = problem(4), Space(4, 16, tp=1, pp=4, microbatch_size=1)
    best = search(asked, space, top_k=1).plans[0]
    assert best.plan.costs is not None
    program = compile_plan(best.plan).train
    table = best.plan.costs.table(program)
    whole = max(v or 0 for v in peak_memory_bytes(program, table))
    assert max(v or 0 for v in peak_bytes(program, table)) < whole == best.peak_bytes
    tight = with_memory(asked, whole - 1)
    answer = search(tight, space, top_k=2)
    assert len(answer.plans) == 2
    assert best.candidate not in {plan.candidate for plan in answer.plans}
    assert all(plan.peak_bytes < whole for plan in answer.plans)
    assert answer.rejected.memory > 0


def test_figures_of_listed_plans_are_those_of_their_programs():
    asked = problem(4)
    answer = search(asked, Space(8, 16), top_k=3)
    assert len(answer.plans) == 3
    for plan in answer.plans:
        assert plan.plan.costs is not None
        program = compile_plan(plan.plan).train
        assert plan.rank_bytes == peak_memory_bytes(program, plan.plan.costs.table(program))


# ------------------------------------------------------------------------------------------ search
#
# The search against simulating every candidate with the compiler and the simulator.


def real_bytes(group: Group, order: Order) -> tuple[int, ...]:
    program = program_of(group, order)
    held = peak_memory_bytes(program, group.costs.table(program))
    return tuple(value for value in held if value is not None)


def fits(group: Group, order: Order, space: Space, limit: int) -> bool:
    expected = expected_bytes(group, order, space) or 0
    return expected <= limit and max(real_bytes(group, order)) <= limit


def _drawn(
    asked: Problem, space: Space, layout: Layout, recompute: Recompute
) -> Iterator[tuple[Sketch, Group]]:
    for sketch in sketches(asked, space, layout, recompute):
        for group in groups_of(asked, space, sketch):
            yield sketch, group


def exhaustive(asked: Problem, space: Space) -> list[Outcome]:
    """Every candidate by its verified program; what O2 leaves out by rule is left out."""
    found = []
    limit = round(asked.machine.hardware.memory_gb * 1e9)
    for tp, pp, dp in degrees(space, asked):
        if asked.refuse_tp(tp) is not None:
            continue
        for layout in layouts(space, asked, tp, pp, dp):
            for recompute in space.recomputes:
                for sketch, group in _drawn(asked, space, layout, recompute):
                    assert sketch.bound <= group.bound * (1 + 1e-9), group
                    for order in group.orders:
                        if (expected_bytes(group, order, space) or 0) > limit:
                            continue
                        others = dominating_candidates(group, order, space, asked)
                        if any(fits(*other, space, limit) for other in others):
                            continue
                        program = program_of(group, order)
                        held = real_bytes(group, order)
                        waits = asked.machine.waits_at_flush
                        time = program_step(program, group.costs, waits=waits)
                        bound = max(group.bound, least_time(asked, group, order))
                        assert time >= bound * (1 - 1e-9), group.candidate(order)
                        least = max(group.least_bytes, least_bytes(asked, group, order))
                        assert max(held) >= least, group.candidate(order)
                        if max(held) <= limit:
                            found.append(Outcome(group, order, time, held))
    return sorted(found, key=rank_key)


CASES = {
    "roomy": (problem(4), Space(8, 16)),
    "a barrier at the flush": (problem(4, barrier=True), Space(8, 16)),
    "tight": (problem(4, memory=1.2e8), Space(8, 32)),
    "two nodes and a pinned schedule": (problem(5), Space(16, 32, schedule="interleaved_1f1b")),
    "half of the space pinned": (problem(6, memory=1.5e8), Space(8, 24, tp=1, dp=2)),
    "ZeRO-1 pinned": (problem(3, memory=6e7), Space(4, 16, overlap="zero1")),
    "ZeRO-1 and few microbatches": (problem(3, memory=6e7), Space(4, 4, overlap="zero1")),
    "late gradients": (
        problem(4, barrier=True),
        Space(4, 16, tp=1, pp=4, microbatch_size=1, asynchronous=True),
    ),
    "every schedule": (problem(2), Space(4, 8, level="O3", tp=1, microbatch_size=1, pp=2)),
}


LONG = (
    "roomy", "a barrier at the flush", "tight", "two nodes and a pinned schedule",
    "half of the space pinned", "ZeRO-1 pinned",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n in LONG else n for n in CASES]
)
def test_the_first_five_are_those_of_simulating_everything(name):
    asked, space = CASES[name]
    answer = search(asked, space)
    expected = exhaustive(asked, space)
    assert [plan.step_time_s for plan in answer.plans] == pytest.approx(
        [plan.step_time_s for plan in expected[:5]], rel=1e-9
    )
    # Of plans that are equal to the last digit either may come first.
    assert {p.candidate for p in answer.plans if p.step_time_s < expected[4].step_time_s} <= {
        p.candidate for p in expected[:5]
    }
    # What is close to the limit is timed first: to look for its messages takes longer.
    assert answer.num_simulated <= len(expected) + answer.rejected.memory
    for plan in answer.plans:
        assert plan.peak_bytes <= asked.room(plan.candidate.layout)


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
@pytest.mark.parametrize("barrier", [True, False], ids=["makespan", "period"])
def test_the_bound_of_two_copies_of_the_weights_knows_the_way_to_the_middle(schedule, barrier):
    asked = problem(8, barrier=barrier)
    space = Space(4, 8, tp=1, pp=4, microbatch_size=1, schedule=schedule)
    (layout,) = layouts(space, asked, 1, 4, 1)
    for recompute in space.recomputes:
        (group,) = groups(asked, space, layout, recompute)
        program = program_of(group, *group.orders)
        time = program_step(program, group.costs, waits=barrier)
        assert group.bound <= time * (1 + 1e-9)
        whole = zip(group.table.forward, group.table.backward, strict=True)
        assert group.bound > layout.num_microbatches * sum(f + b for f, b in whole) / layout.pp


@pytest.mark.parametrize(
    ("schedule", "microbatches", "barrier"),
    [
        ("1f1b", 16, True), ("eager_1f1b", 6, False), ("interleaved_1f1b", 4, True),
        ("chimera", 4, True), ("gpipe", 3, False), ("zb_v", 4, False),
    ],
)  # fmt: skip
def test_what_mario_takes_and_holds_at_least_is_known_before_its_lists(
    schedule, microbatches, barrier
):
    asked, mario = problem(8, vocab=256, barrier=barrier), Recompute("mario")
    space = Space(
        4, microbatches, tp=1, pp=4, microbatch_size=1, schedule=schedule, recompute=mario,
        stages_per_rank=2 if schedule == "interleaved_1f1b" else None,
    )  # fmt: skip
    (layout,) = layouts(space, asked, 1, 4, 1)
    none = groups(asked, replace(space, recompute=NO_RECOMPUTE), layout, NO_RECOMPUTE)
    for group, plain in zip(groups(asked, space, layout, mario), none, strict=True):
        for order in group.orders:
            time = program_step(program_of(group, order), group.costs, waits=barrier)
            bound = least_time(asked, group, order)
            assert bound <= time * (1 + 1e-9), order
            assert bound >= group.bound >= plain.bound or find_schedule(schedule).cost_aware, order
            assert max(bound, group.bound) > plain.bound, order
            held = max(real_bytes(group, order))
            assert group.least_bytes < least_bytes(asked, group, order) <= held, order


def test_gradients_are_late_only_where_that_is_asked_for():
    asked = problem(4)
    space = Space(4, 4, tp=1, pp=4, microbatch_size=1)
    assert "pipedream_2bw" not in {p.candidate.order.schedule for p in search(asked, space).plans}
    late = replace(space, asynchronous=True)
    best = search(asked, late).plans[0]
    assert best.candidate.order.schedule == "pipedream_2bw"
    program = compile_plan(best.plan).train
    costs = best.plan.costs
    assert best.step_time_s == pytest.approx(simulate(program, costs).period)
    assert best.rank_bytes == peak_memory_bytes(program, costs.table(program))
    # Its versions of the weights count: with a byte less they do not fit.
    tight = with_memory(asked, best.peak_bytes - 1)
    assert best.candidate not in {p.candidate for p in search(tight, late).plans}
    # Where ranks agree on every update, they wait for each other, but drain nothing.
    waiting = program_step(program, costs, waits=True)
    flushed = compile_plan(replace(best.plan, schedule="1f1b")).train
    assert best.step_time_s < waiting < program_step(flushed, costs, waits=True)


def test_tight_memory_brings_recomputation_in():
    tight = problem(8, memory=6e7, hidden=128, vocab=512)
    answer = search(tight, Space(4, 32, tp=1, dp=1, microbatch_size=4))
    assert answer.plans
    assert all(plan.candidate.recompute.policy in ("full", "mario") for plan in answer.plans)
    assert answer.rejected.memory > 0


def test_what_is_pinned_stays():
    answer = search(problem(6), Space(8, 16, tp=2, schedule="zb_h1", microbatch_size=2))
    assert answer.plans
    for plan in answer.plans:
        candidate = plan.candidate
        assert (candidate.layout.tp, candidate.order.schedule) == (2, "zb_h1")
        assert candidate.layout.microbatch_size == 2
        layout = candidate.layout
        assert layout.tp * layout.pp * layout.dp == 8
        assert layout.dp * layout.microbatch_size * layout.num_microbatches == 16


def test_reasons_are_given_for_what_is_not_listed():
    asked = problem(4, memory=1.2e8)
    answer = search(asked, Space(12, 16))
    assert set(answer.rejected.tp) == {3}
    # A model that can be cut into three, on nodes of four: some of the ranks are on two.
    found = search(replace(asked, refuse_tp=lambda tp: None), Space(12, 16))
    assert found.rejected.tp == {
        3: "does not divide hardware.gpus_per_node=4, so its sums would leave a node"
    }
    assert all(plan.candidate.layout.tp != 3 for plan in found.plans)
    assert answer.rejected.batch == {3, 6, 12}
    assert answer.rejected.nearest is not None
    assert answer.rejected.nearest[0] > asked.machine.hardware.memory_gb * 1e9
    listed = len(answer.plans)
    counted = answer.rejected.memory + answer.rejected.slower + answer.rejected.dominated
    assert listed + counted == answer.num_candidates


def test_nothing_fits_into_nothing():
    answer = search(problem(4, memory=1e6), Space(8, 16))
    assert answer.plans == ()
    assert answer.rejected.memory == answer.num_candidates > 0


def test_where_optimal_finds_no_order_nobody_knows_what_it_needs():
    asked, memory = problem(4, memory=4.05e8), 0.405
    hardware = replace(asked.machine.hardware, memory_gb=memory)
    asked = replace(asked, machine=replace(asked.machine, hardware=hardware))
    pinned = {"schedule": "1f1b", "recompute": Recompute("optimal"), "microbatch_size": 8}
    answer = search(asked, Space(2, 16, tp=1, pp=2, **pinned))
    assert answer.plans == ()
    assert answer.rejected.memory == 1
    assert answer.rejected.nearest is None


def test_orders_are_walked_once_for_many_cost_tables(monkeypatch):
    asked, walked = problem(6), []
    walk = outcome.build_order_graph
    monkeypatch.setattr(
        outcome, "build_order_graph", lambda lists: walked.append(lists) or walk(lists)
    )
    space = Space(8, 16, pp=4, schedule="1f1b", microbatch_size=1, level="O2")
    times = set()
    for tp, pp, dp in degrees(space, asked):
        for layout in layouts(space, asked, tp, pp, dp):
            for group in groups(asked, space, layout, space.recomputes[0]):
                times.add(evaluate(asked, group, group.orders[0]).step_time_s)
    assert len(times) > 1
    assert len(times) > len(walked) > 0
    assert all(math.isfinite(time) for time in times)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zb_v"])
@pytest.mark.parametrize("microbatches", [8, 16])
def test_what_orders_are_expected_to_hold_is_no_more_than_they_do(schedule, microbatches):
    asked = problem(6)
    space = Space(4, microbatches, pp=4, microbatch_size=1)
    (layout,) = layouts(space, asked, 1, 4, 1)
    for group in groups(asked, space, layout, space.recomputes[0]):
        for order in group.orders:
            expected = expected_bytes(group, order, space)
            if order.schedule == schedule:
                assert expected is not None
                assert expected <= 1.05 * max(real_bytes(group, order))
            elif order.schedule == "1f1b":
                assert expected is None


@pytest.mark.parametrize("num_sms", [None, 8])
def test_stages_that_only_hand_on_more_are_timed_once_where_that_takes_no_time(num_sms):
    asked = problem(4)
    work = Work(products=(Product(64, 64, 64),))

    def loads(tp: int, size: int, selective: bool) -> tuple[Load, ...]:
        units = asked.loads(tp, size, selective)
        return tuple(
            replace(unit, output_elements=unit.output_elements + n, works=((work, 1),))
            for n, unit in enumerate(units)
        )

    machine = replace(asked.machine, hardware=replace(asked.machine.hardware, num_sms=num_sms))
    grown = replace(asked, loads=loads, machine=machine)
    layout = Layout(tp=1, pp=3, dp=1, microbatch_size=1, num_microbatches=4)
    costs = grown.costs(layout, (4, 2, 4))  # the middle one is attention and MLP
    alone = grown.costs(layout, (4, 2, 2, 2))
    sent = [load.output_elements for load in alone.stages]
    assert sent == [loads(1, 1, False)[end - 1].output_elements for end in (4, 6, 8, 10)]
    again = AnalyticCosts(alone.stages, machine.hardware, sizes=machine.sizes)
    assert alone.compute_only() == again.compute_only()
    assert costs.compute_only().forward[1] == alone.compute_only().forward[1]
    timed = len(grown.known.durations)
    assert timed == (5 if num_sms is None else 4)
