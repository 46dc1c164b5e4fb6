"""The four passes, as the paper counts them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_compute, compile_plan
from strategies.ir import Kind, verify
from strategies.passes.recompute.local_search import prepose_forward
from strategies.passes.recompute.mario import (
    apply_checkpoint,
    overlap_recompute,
    remove_redundancy,
)
from strategies.passes.updates import separate_pairs
from strategies.plan import Plan, Recompute
from tests.strategies.programs import plans, texts, uneven, written


def test_every_backward_gets_an_r_that_waits_for_its_gradient():
    program = written("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", num_microbatches=2)
    assert texts(verify(apply_checkpoint(program))) == [
        "0F0 0F1 0R0@1B0 0B0 0R1@1B1 0B1",
        "1F0 1R0 1B0 1F1 1R1 1B1",
    ]


def test_with_a_split_backward_it_stands_before_the_i():
    program = written("0F0 0I0 0W0\n1F0 1I0 1W0", num_microbatches=1)
    assert texts(verify(apply_checkpoint(program))) == ["0F0 0R0@1I0 0I0 0W0", "1F0 1R0 1I0 1W0"]


def test_before_a_fused_pair_it_makes_what_the_pair_reads():
    program = written("0F0 (0F1;0B0)OVERLAP_F_B 0B1", num_microbatches=2)
    found = verify(apply_checkpoint(program))
    assert texts(found) == ["0F0 0R0 (0F1;0B0)OVERLAP_F_B 0R1 0B1"]
    assert texts(verify(separate_pairs(found))) == ["0F0 0R0 0F1 0B0 0R1 0B1"]


def test_once_there_are_messages_the_edge_names_the_receive():
    program = compile_program(pp=2, num_microbatches=1, recompute=Recompute("full"))
    assert texts(program)[0].split()[:4] == ["0F0", "0SEND_F0>1", "0RECV_B0<1", "0R0@0RECV_B0<1"]


def test_the_receive_comes_first_where_sends_wait_too():
    costs = UniformCosts(transport="rendezvous", p2p=0.1)
    for name in ("1f1b", "chimera"):
        program = compile_program(
            schedule=name, pp=2, num_microbatches=4, costs=costs, recompute=Recompute("full")
        )
        assert simulate(program, costs).makespan > 0


# ------------------------------------------------------------------------------------ mario passes
#
# The four passes, as the paper counts them.


COSTS = UniformCosts()


def makespan(microbatches, *policy, pp=4, **options):
    program = compile_program(
        pp=pp, num_microbatches=microbatches, recompute=Recompute(*policy), costs=COSTS, **options
    )
    return simulate(program, COSTS).makespan


@pytest.mark.parametrize(
    ("microbatches", "wanted"),
    [(4, (21, 28, 25, 23, 22)), (5, (24, 32, 29, 27, 26)), (6, (27, 36, 33, 31, 30))],
)
def test_the_figures_of_the_paper(microbatches, wanted):
    policies = (("none",), ("full",), ("mario", 2), ("mario", 3), ("mario", 4))
    assert tuple(makespan(microbatches, *policy) for policy in policies) == wanted
    assert makespan(microbatches, "mario", 1) == wanted[1]


@pytest.mark.parametrize(("pp", "microbatches"), [(3, 9), (4, 16), (8, 8)])
def test_the_closed_forms_for_equal_stages(pp, microbatches):
    recomputed = microbatches * 4
    assert makespan(microbatches, "mario", 2, pp=pp) == (pp - 1) * 3 + recomputed
    assert makespan(microbatches, "mario", 4, pp=pp) == (pp - 2) * 3 + recomputed


def test_recomputation_without_its_edge_runs_while_the_gradient_is_on_its_way():
    program = written("0F0 0R0@1B0 0B0\n1F0 1R0 1B0", num_microbatches=1)
    assert texts(verify(overlap_recompute(program))) == ["0F0 0R0 0B0", "1F0 1R0 1B0"]


def test_a_forward_that_is_recomputed_at_once_keeps_its_graph():
    program = written("0F0 0F1 0R0 0B0 0R1 0B1\n1F0 1R0 1B0 1F1 1R1 1B1", num_microbatches=2)
    assert texts(verify(remove_redundancy(program))) == [
        "0F0 0F1 0R0 0B0 0R1 0B1",
        "1F0 1B0 1F1 1B1",
    ]


def test_a_forward_moves_into_the_wait_for_a_gradient():
    program = written(
        "0F0 0R0 0B0 0F1 0R1 0B1\n1F0 1B0 1F1 1B1",
        num_microbatches=2,
    )
    moved = verify(prepose_forward(program, COSTS.table(program)))
    assert texts(moved)[0] == "0F0 0R0 0F1 0B0 0R1 0B1"


def test_a_forward_that_keeps_its_activation_does_not_move_where_the_peak_would_rise():
    program = written("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1", num_microbatches=2)
    assert prepose_forward(program, COSTS.table(program)).ranks == program.ranks


def test_a_move_that_delays_more_than_it_gains_is_taken_back():
    program = written("0F0 0R0 0B0 0F1 0R1 0B1\n1F0 1B0 1F1 1B1", num_microbatches=2)
    costs = uneven(program, [50, 1], backward=[1, 1])
    assert prepose_forward(program, costs.table(program)).ranks == program.ranks


def bare(program):
    """All but R, per rank and kind of work, in order."""
    return [
        sorted(str(p) for item in row for p in item.parts if p.kind is not Kind.R)
        for row in program.ranks
    ]


@settings(max_examples=settings.default.max_examples // 2)
@given(plans(), st.integers(1, 4))
def test_no_pass_loses_an_instruction_or_raises_the_peak(plan, passes):
    plan = Plan(
        plan.schedule,
        plan.pp,
        plan.num_microbatches,
        plan.stages_per_rank,
        plan.group or (min(plan.pp, plan.num_microbatches) if plan.schedule == "foldx" else None),
        split_backward=plan.split_backward,
        costs=plan.costs,
        recompute=Recompute("mario", passes),
    )
    before = compile_compute(Plan(*[getattr(plan, name) for name in (
        "schedule", "pp", "num_microbatches", "stages_per_rank", "group", "overlap", "buckets",
        "split_backward", "costs",
    )]))  # fmt: skip
    after = compile_compute(plan)
    assert bare(after) == bare(before)
    if passes < 4:
        forwards = [[str(i) for i in row if i.kind is not Kind.R] for row in after.ranks]
        split = [[str(p) for i in row for p in i.parts] for row in before.ranks]
        assert forwards in ([[str(i) for i in row] for row in before.ranks], split)
    naive = apply_checkpoint(before)
    for now, then in zip(peak_activations(after), peak_activations(naive), strict=True):
        assert now <= then + 1e-9
    for program in (compile_plan(plan).train, compile_plan(plan).accumulate):
        assert verify(program) is program


@pytest.mark.parametrize(
    "schedule", ["interleaved_1f1b", "zb_v", "chimera", "foldx_fifo", "dualpipe"]
)
def test_each_pass_is_at_least_as_fast_as_the_one_before(schedule):
    times = [makespan(8, "mario", passes, schedule=schedule) for passes in (1, 2, 3, 4)]
    assert times == sorted(times, reverse=True)
    assert times[3] < times[0]


def test_fused_pairs_that_gain_stay_fused():
    costs = UniformCosts(fused=2.0)
    program = compile_program(
        schedule="dualpipe", pp=4, num_microbatches=8, costs=costs, recompute=Recompute("mario")
    )
    assert any(item.halves for row in program.ranks for item in row)
