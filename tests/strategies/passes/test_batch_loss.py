from __future__ import annotations

import pytest
from hypothesis import given, settings

from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_plan
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError, ProgramError
from strategies.ir import verify
from strategies.ir.kinds import Kind
from strategies.passes.updates import add_batch_loss, forwards_first
from strategies.plan import Plan, ScheduleFile
from strategies.simulator.engine import simulate
from tests.strategies.programs import lines, plans, refusal, texts, written

ONE_F_ONE_B = """
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
"""


def test_the_loss_stands_between_forwards_and_backwards() -> None:
    program = written(ONE_F_ONE_B, num_microbatches=2)
    assert texts(verify(add_batch_loss(program))) == lines(
        """
        0F0 0F1 0B0 0B1
        1F0 1F1 1LOSS 1B0 1B1
        """
    )


def test_either_part_keeps_its_order() -> None:
    program = written("(0F1;0B0)OVERLAP_F_B 0F0 0B1", num_microbatches=2)
    assert texts(forwards_first(program)) == ["0F1 0F0 0B0 0B1"]


def test_forward_programs_end_with_it_and_accumulation_has_it() -> None:
    programs = compile_plan(Plan("zb_v", 2, 4, loss_over="batch"))
    assert str(programs.forward.ranks[0][-1]) == "3LOSS"
    for program in programs.all:
        found = [str(item) for row in program.ranks for item in row if item.kind is Kind.LOSS]
        assert found == ["3LOSS"]
    short = compile_plan(Plan("zb_v", 2, 4, loss_over="batch"), 3).train
    place = [str(item) for item in short.ranks[0]].index("3LOSS")
    assert {str(item) for item in short.ranks[0][:place]} >= {"3F0", "3F1", "3F2"}


@given(plans())
@settings(max_examples=40, deadline=None)
def test_every_schedule_with_one_owner_of_its_last_stage_runs_with_it(plan: Plan) -> None:
    if plan.recompute.policy in ("mario", "optimal"):
        return
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    asked = Plan(**{**fields, "loss_over": "batch"})
    if compile_plan(plan).train.placement.weight_copies > 1:
        with pytest.raises(PlanError, match="holds every stage twice"):
            compile_plan(asked)
        return
    compile_plan(asked)


def test_time_and_memory_are_those_of_all_forwards_first() -> None:
    costs = UniformCosts()
    for schedule in ("1f1b", "zb_h1", "interleaved_1f1b"):
        plain = compile_plan(Plan(schedule, 4, 8, costs=costs)).train
        whole = compile_plan(Plan(schedule, 4, 8, costs=costs, loss_over="batch")).train
        assert max(peak_activations(plain)) < 8
        assert peak_activations(whole) == (8.0,) * 4
    gpipe = compile_plan(Plan("gpipe", 4, 8, costs=costs)).train
    whole = compile_plan(Plan("1f1b", 4, 8, costs=costs, loss_over="batch")).train
    assert simulate(whole, costs).makespan == simulate(gpipe, costs).makespan


def test_an_order_by_hand_is_never_rearranged() -> None:
    file = ScheduleFile("my.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(PlanError, match=r"schedule\.file=my\.csv has backwards before"):
        compile_plan(Plan("custom", 2, 2, file=file, loss_over="batch"))
    file = ScheduleFile("my.csv", "0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0\n")
    program = compile_plan(Plan("custom", 2, 2, file=file, loss_over="batch", buckets=0)).train
    assert "1F0 1F1 1LOSS" in " ".join(str(i) for i in program.ranks[1] if i.payload is None)


def test_an_unknown_word_names_those_there_are() -> None:
    with pytest.raises(PlanError, match="Try loss_over=microbatch or loss_over=tokens"):
        Plan(loss_over="step")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1LOSS 1B1", "1B0 on rank 1 stands before 1LOSS"),
        ("0F0 0F1 0B0 0B1\n1F0 1F1 1LOSS 1LOSS 1B0 1B1", "1LOSS stands a second time on rank 1"),
        ("0F0 0F1 0LOSS 0B0 0B1\n1F0 1F1 1B0 1B1", "only one owner of stage 1 has"),
    ],
)
def test_a_loss_out_of_place_is_refused(text: str, message: str) -> None:
    assert message in refusal(written(text, num_microbatches=2))


def test_a_loss_before_a_forward_deadlocks() -> None:
    program = written("0F0 0F1 0B0 0B1\n1F0 1LOSS 1F1 1B0 1B1", num_microbatches=2)
    with pytest.raises(ProgramError, match="1LOSS"):
        verify(program)
