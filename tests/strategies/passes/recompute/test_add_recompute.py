from __future__ import annotations

from dataclasses import replace

import pytest

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_memory_bytes
from strategies.compiler import compile_plan, compile_short
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import Hardware
from strategies.costs.load import Load
from strategies.errors import PlanError
from strategies.ir import Kind
from strategies.ir.program import recomputed_pairs
from strategies.plan import Plan, Recompute
from strategies.schedules import SCHEDULES
from tests.strategies.programs import texts


def test_full_recomputes_every_pair():
    program = compile_program(
        schedule="interleaved_1f1b", pp=2, num_microbatches=4, recompute=Recompute("full")
    )
    assert len(recomputed_pairs(program)) == 4 * 4


@pytest.mark.parametrize("policy", ["mario", "optimal"])
def test_an_asynchronous_schedule_has_nothing_to_hide_in(policy, monkeypatch):
    endless = replace(SCHEDULES["pipedream_2bw"], name="endless", rule=None)
    monkeypatch.setitem(SCHEDULES, "endless", endless)
    cap = 1.0 if policy == "optimal" else None
    with pytest.raises(PlanError, match=rf"recompute={policy}: endless never drains"):
        compile_program(
            schedule="endless", pp=2, recompute=Recompute(policy, max_full_activations=cap)
        )
    compile_program(schedule="endless", pp=2, recompute=Recompute("full"))


def test_the_forward_program_recomputes_nothing_and_the_others_alike():
    programs = compile_plan(Plan("1f1b", 4, 8, recompute=Recompute("mario")))
    assert not recomputed_pairs(programs.forward)
    assert recomputed_pairs(programs.train) == recomputed_pairs(programs.accumulate) != set()


def test_a_short_batch_keeps_what_is_recomputed():
    plan = Plan("1f1b", 2, 4, recompute=Recompute("full"))
    short = compile_short(plan, 3).train
    assert recomputed_pairs(short) == {(s, m) for s in range(2) for m in range(3)}


@pytest.mark.parametrize("policy", [("full",), ("mario",), ("optimal", 4, 1.0)])
def test_reductions_and_gathers_stand_as_without(policy):
    plan = Plan("foldx_fifo", 2, 4, overlap="zero1", recompute=Recompute(*policy))
    row = texts(compile_plan(plan).train)[0].split()
    assert row[0].endswith("GATHER")
    assert row[-1].endswith("STEP")
    assert sum("REDUCE" in word for word in row) == 2


def test_the_group_of_foldx_is_chosen_without_searching_for_each():
    costs = UniformCosts(grad_reduce=4.0)
    plan = Plan("foldx", 2, 6, costs=costs, recompute=Recompute("optimal", 4, 1.0))
    plain = compile_plan(replace(plan, recompute=Recompute()))
    assert compile_plan(plan).choice == plain.choice


def test_recomputation_takes_the_time_that_costs_give_it():
    for recompute, wanted in ((0.0, 21), (1.0, 28), (2.0, 35)):
        costs = UniformCosts(recompute=recompute)
        program = compile_program(
            pp=4, num_microbatches=4, costs=costs, recompute=Recompute("full")
        )
        assert simulate(program, costs).makespan == wanted
        assert all(Kind.R in {i.kind for i in row} for row in program.ranks)


MACHINE = Hardware("test", 1e12, 0.5, 1.0, 1e11, 1e10, 1e-6, 1e10, 1e-6, 8)
LOADS = tuple(Load(1e9, 1_000, 1_000, 100_000) for _ in range(4))
COSTS = AnalyticCosts(LOADS, MACHINE)
STATE = 1_000 * 4 * 4


def held(limit):
    plan = Plan("1f1b", 4, 8, costs=COSTS, memory_bytes=limit, recompute=Recompute("optimal"))
    program = compile_plan(plan).train
    return program, peak_memory_bytes(program, COSTS.table(program))


def test_what_fits_into_memory_is_not_recomputed():
    plain = compile_plan(Plan("1f1b", 4, 8, costs=COSTS)).train
    least = max(peak_memory_bytes(plain, COSTS.table(plain)))
    assert held(least)[0] == plain
    program, peaks = held(least - 1)
    assert program != plain
    assert max(peaks) < least


@pytest.mark.parametrize("activations", [1.13, 2.1, 3.0])
def test_every_rank_keeps_the_memory_limit_with_the_inputs_it_stores(activations):
    limit = STATE + int(activations * 400_000)
    program, peaks = held(limit)
    assert max(peaks) <= limit
    assert program != compile_plan(Plan("1f1b", 4, 8, costs=COSTS)).train


def test_where_inputs_take_too_much_the_order_of_the_schedule_stores_fewer():
    program, _ = held(STATE + int(1.13 * 400_000))
    first = [item.kind for item in program.ranks[0] if item.kind in (Kind.F, Kind.B)]
    assert first[:6] == [Kind.F] * 4 + [Kind.B, Kind.F]


def test_a_limit_that_nothing_fits_in_names_the_smallest_that_does_and_its_cost():
    with pytest.raises(PlanError) as error:
        held(STATE + 100)
    text = str(error.value)
    assert "rank 0" in text or "rank 1" in text
    assert "takes" in text and "without recomputation" in text
    smallest = float(text.split("Try hardware.memory_gb=")[1].split(",")[0])
    _, peaks = held(int(smallest * 1e9))
    assert max(peaks) <= smallest * 1e9


@pytest.mark.parametrize(("schedule", "least"), [("1f1b", "1"), ("zb_v", "0.5"), ("chimera", "1")])
def test_a_cap_below_one_activation_names_the_smallest_and_what_it_costs(schedule, least):
    with pytest.raises(PlanError, match=rf"smallest cap is {least}; .*=0?{least}\.$"):
        compile_program(
            schedule=schedule,
            pp=4,
            num_microbatches=4,
            costs=UniformCosts(),
            recompute=Recompute("optimal", max_full_activations=0.3),
        )


def test_without_bytes_and_without_a_cap_there_is_no_limit_to_keep():
    with pytest.raises(PlanError, match=r"Try recompute\.max_full_activations=1"):
        compile_program(
            pp=4, num_microbatches=4, costs=UniformCosts(), recompute=Recompute("optimal")
        )
