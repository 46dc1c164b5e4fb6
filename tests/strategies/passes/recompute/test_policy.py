from dataclasses import replace

import pytest

from strategies import UniformCosts, compile_program, simulate
from strategies.compiler import compile_plan, compile_short
from strategies.errors import PlanError
from strategies.ir import Kind
from strategies.ir.recomputed import recomputed_pairs
from strategies.plan import Plan
from strategies.recompute import Recompute
from strategies.schedules import SCHEDULES
from tests.strategies.programs import texts


def test_full_recomputes_every_pair():
    program = compile_program(
        schedule="interleaved_1f1b", pp=2, num_microbatches=4, recompute=Recompute("full")
    )
    assert len(recomputed_pairs(program)) == 4 * 4


@pytest.mark.parametrize("policy", ["mario", "optimal"])
def test_an_asynchronous_schedule_has_nothing_to_hide_in(policy, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "endless", replace(SCHEDULES["1f1b"], name="endless",
                                                      synchronous=False))  # fmt: skip
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
