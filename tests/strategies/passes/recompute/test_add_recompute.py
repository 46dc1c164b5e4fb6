from __future__ import annotations

from dataclasses import replace

import pytest

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_memory_bytes
from strategies.compiler import compile_plan
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


def test_an_asynchronous_schedule_has_nothing_to_hide_in(monkeypatch):
    endless = replace(SCHEDULES["pipedream_2bw"], name="endless", rule=None)
    monkeypatch.setitem(SCHEDULES, "endless", endless)
    with pytest.raises(PlanError, match="recompute=mario: endless never drains"):
        compile_program(schedule="endless", pp=2, recompute=Recompute("mario"))
    compile_program(schedule="endless", pp=2, recompute=Recompute("full"))


def full_at_most(row, again):
    """Activations that a rank holds at its worst moment, of which those run again lack some."""
    held = most = 0
    for item in row:
        pair = item.stage, item.microbatch
        held += item.kind is Kind.R or (item.kind is Kind.F and pair not in again)
        most = max(most, held)
        held -= item.kind is Kind.B
    return most


@pytest.mark.parametrize(
    ("schedule", "microbatches", "batches", "length"),
    [("pipedream_2bw", 6, 1, 12), ("pipedream_2bw", 2, 3, 6), ("pipedream", 1, 1, 5)],
)
def test_without_a_flush_as_many_are_kept_in_every_period_as_a_cap_allows(
    schedule, microbatches, batches, length
):
    """Of d forwards under way one that runs again has d - 1 behind it: cap - 1 of them are kept."""
    for cap in (1, 2, 3, 4):
        recompute = Recompute("optimal", max_full_activations=float(cap))
        plan = Plan(schedule, 4, microbatches, recompute=recompute, accumulation=batches)
        programs = compile_plan(plan)
        again = recomputed_pairs(programs.train)
        for rank, row in enumerate(programs.train.ranks):
            assert full_at_most(row, again) == min(cap, 4 - rank)
        calls = programs.stream
        rounds = [calls.step(calls.first_steady + n).ranks for n in range(calls.cycle)]
        run = [sum(i.kind is Kind.R for round_ in rounds for i in round_[rank]) for rank in (0, 1)]
        period = sum(i.kind is Kind.F for round_ in rounds for i in round_[0])
        assert period == length
        assert run == [period - min(period, period * (cap - 1) // behind) for behind in (3, 2)]


def test_without_a_flush_what_fits_into_memory_is_not_recomputed_and_a_limit_is_kept():
    def bytes_of(limit, policy):
        plan = Plan("pipedream_2bw", 4, 4, costs=COSTS, memory_bytes=limit)
        program = compile_plan(replace(plan, recompute=policy)).train
        return program, max(peak_memory_bytes(program, COSTS.table(program)))

    plain, most = bytes_of(None, Recompute())
    full, least = bytes_of(None, Recompute("full"))
    assert bytes_of(most, Recompute("optimal"))[0] == plain
    between, held = bytes_of((most + least) // 2, Recompute("optimal"))
    assert held <= (most + least) // 2
    assert 0 < len(recomputed_pairs(between)) < len(recomputed_pairs(full))
    with pytest.raises(PlanError, match=r"microbatches take .* without recomputation\. Try"):
        bytes_of(least // 2, Recompute("optimal"))


def test_the_forward_program_recomputes_nothing_and_the_others_alike():
    programs = compile_plan(Plan("1f1b", 4, 8, recompute=Recompute("mario")))
    assert not recomputed_pairs(programs.forward)
    assert recomputed_pairs(programs.train) == recomputed_pairs(programs.accumulate) != set()


def test_a_short_batch_keeps_what_is_recomputed():
    plan = Plan("1f1b", 2, 4, recompute=Recompute("full"))
    short = compile_plan(plan, 3).train
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
