import re
from dataclasses import replace
from pathlib import Path

import pytest

import strategies.schedules as schedules
from strategies import UniformCosts, compile_program
from strategies.compiler import compile_plan
from strategies.errors import PlanError, ProgramError
from strategies.ir.instruction import (
    Instruction,
    backward,
    forward,
    input_gradient,
    weight_gradient,
)
from strategies.ir.kinds import Kind
from strategies.ir.program import Placement, bidirectional, loop, v
from strategies.plan import Plan
from strategies.schedules import SCHEDULES, find_schedule, register_schedule
from strategies.schedules.schedule import Schedule, Shape
from strategies.schedules.synonym import SYNONYMS
from tests.strategies.programs import ALL_SCHEDULES, compute_texts

ROOT = Path(__file__).parents[3]


@pytest.fixture
def registry(monkeypatch):
    """A copy, so that what a test registers ends with the test."""
    copy = dict(SCHEDULES)
    monkeypatch.setattr(schedules, "SCHEDULES", copy)
    return copy


def test_every_schedule_has_a_name_a_yaml_file_and_a_test_file():
    yaml = {path.stem for path in (ROOT / "conf" / "schedule").glob("*.yaml")}
    names = {*SCHEDULES, "custom"}  # which has its order from a file and not from the registry
    tests = {name for name in names if Path(__file__).with_name(f"test_{name}.py").is_file()}
    assert yaml == names == tests
    assert all(name == schedule.name for name, schedule in SCHEDULES.items())


def test_the_first_schedules_are_all_there():
    assert set(ALL_SCHEDULES) <= set(SCHEDULES)


def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(PlanError) as error:
        find_schedule("foldx_fif")
    message = str(error.value)
    assert message.startswith("schedule=foldx_fif is unknown. Did you mean schedule=foldx_fifo")


def test_a_name_that_resembles_nothing_gets_all_of_them():
    with pytest.raises(PlanError) as error:
        find_schedule("zzzzzz")
    assert all(name in str(error.value) for name in SCHEDULES)


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("pipedream_flush", "1f1b"),
        ("fthenb", "gpipe"),
        ("vpp", "interleaved_1f1b"),
        ("1f1b-interleaved", "interleaved_1f1b"),
        ("zbh1", "zb_h1"),
        ("ZB-H2", "zb_h2"),
        ("zbvpp", "zb_v"),
        ("V", "1f1b"),
        ("X", "chimera"),
        ("W", "interleaved_1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("ScheduleInterleavedZeroBubble", "interleaved_zb"),
        ("forward_backward_pipelining_without_interleaving", "1f1b"),
        ("PipelineFThenBPass", "gpipe"),
        ("PipeDream-2BW", "pipedream_2bw"),
        ("2BW", "pipedream_2bw"),
        ("weight_stashing", "pipedream"),
        ("PipelineScheduleMulti", "custom schedule.file=my.csv"),
    ],
)
def test_names_that_others_have_are_answered_with_ours(word, typed):
    with pytest.raises(PlanError) as error:
        find_schedule(word)
    assert str(error.value).endswith((f"Try schedule={typed}.", f"Did you mean schedule={typed}?"))


def test_every_name_of_others_means_one_schedule_that_can_be_typed():
    folded = [re.sub(r"[^a-z0-9]", "", word.lower()) for word in (*SYNONYMS, *SCHEDULES, "custom")]
    assert len(folded) == len(set(folded))
    assert {typed.split()[0] for typed in SYNONYMS.values()} <= {*SCHEDULES, "custom"}


def test_a_name_of_others_that_somebody_has_registered_is_his(registry):
    register_schedule("vpp")(SCHEDULES["gpipe"].order)
    assert find_schedule("vpp") is registry["vpp"]


def test_a_registered_function_is_compiled_like_ours(registry):
    @register_schedule("backwards_first")
    def order(shape):
        return tuple(
            tuple(
                make(rank, microbatch)
                for microbatch in reversed(range(shape.num_microbatches))
                for make in (forward, backward)
            )
            for rank in range(shape.pp)
        )

    program = compile_program(schedule="backwards_first", pp=2, num_microbatches=2)
    assert compute_texts(program) == ["0F1 0B1 0F0 0B0", "1F1 1B1 1F0 1B0"]
    assert registry["backwards_first"].order is order


def test_a_name_is_registered_once(registry):
    with pytest.raises(PlanError) as error:
        register_schedule("gpipe")(lambda shape: ())
    assert str(error.value) == "schedule=gpipe is registered already. Choose another name."


def test_the_name_of_own_files_is_taken(registry):
    with pytest.raises(PlanError) as error:
        register_schedule("custom")(lambda shape: ())
    assert str(error.value) == "schedule=custom is registered already. Choose another name."


def test_a_registered_function_may_look_at_costs_and_split_its_backwards(registry):
    seen = []

    @register_schedule("looks", cost_aware=True, splits_backward=True)
    def order(shape):
        seen.append(shape.durations)
        microbatches = range(shape.num_microbatches)
        makers = (forward, input_gradient, weight_gradient)
        return tuple(
            tuple(make(rank, m) for m in microbatches for make in makers)
            for rank in range(shape.pp)
        )

    costs = UniformCosts(forward=2, backward=5, backward_input=3)
    plan = Plan("looks", 2, 1, costs=costs)
    assert compute_texts(compile_plan(plan).train) == ["0F0 0I0 0W0", "1F0 1I0 1W0"]
    assert (seen[0].forward, seen[0].backward_weight) == ((2, 2), (2, 2))
    with pytest.raises(PlanError, match="looks splits its backwards by itself"):
        compile_plan(replace(plan, split_backward=True))


def test_a_registered_function_may_have_a_rule(registry):
    def rule(shape):
        if shape.num_microbatches % 3:
            raise PlanError("threes only")

    register_schedule("threes", rule=rule)(SCHEDULES["gpipe"].order)
    assert compile_program(schedule="threes", pp=2, num_microbatches=3).num_microbatches == 3
    with pytest.raises(PlanError, match="threes only"):
        compile_program(schedule="threes", pp=2, num_microbatches=4)


def test_a_registered_function_may_bring_its_placement(registry):
    def placement(shape):
        return Placement("turned", shape.pp, (tuple(range(shape.pp))[::-1],))

    @register_schedule("turned", placement=placement)
    def order(shape):
        return SCHEDULES["gpipe"].order(shape)[::-1]

    program = compile_program(schedule="turned", pp=3, num_microbatches=1)
    assert compute_texts(program) == ["2F0 2B0", "1F0 1B0", "0F0 0B0"]
    assert program.placement.name == "turned"


def test_two_weight_copies_go_with_their_placement(registry):
    register_schedule("opposed", placement="bidirectional", stages_per_rank=2)(lambda shape: ())
    register_schedule("doubled", placement=lambda shape: loop(shape.pp, 1), weight_copies=2)(
        lambda shape: ()
    )
    register_schedule("single")(lambda shape: ())
    copies = [registry[name].weight_copies for name in ("opposed", "doubled", "single")]
    assert copies == [2, 2, 1]


def test_a_registered_function_that_forgets_an_instruction_is_named(registry):
    register_schedule("forgetful")(lambda shape: ((forward(0, 0),),))
    with pytest.raises(ProgramError) as error:
        compile_program(schedule="forgetful", pp=1, num_microbatches=1)
    assert str(error.value) == (
        "forgetful: 0F0 on rank 0 has no whole backward. Write 0B0, or 0I0 and 0W0, after it."
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "no list of instructions per rank"),
        (((), ()), "2 rows for 1 ranks"),
        ((("0F0", "0B0"),), "rank 0 has '0F0', which is no Instruction"),
        (((forward(0, 0), Instruction(Kind.STEP, 0)),), "rank 0 has 0STEP. A schedule orders"),
    ],
    ids=["nothing", "rows", "text", "step"],
)
def test_a_registered_function_that_returns_no_order_is_told_what_to_return(
    registry, made, message
):
    register_schedule("odd")(lambda shape: made)
    with pytest.raises(ProgramError, match=message):
        compile_program(schedule="odd", pp=1, num_microbatches=1)


def test_a_placement_that_is_none_is_refused(registry):
    register_schedule("nowhere", placement=lambda shape: None)(SCHEDULES["gpipe"].order)
    with pytest.raises(PlanError, match="returned None, not a Placement"):
        compile_program(schedule="nowhere", pp=1, num_microbatches=1)


def test_a_default_of_no_stages_is_refused(registry):
    with pytest.raises(PlanError, match="stages_per_rank=0 of schedule=empty"):
        register_schedule("empty", stages_per_rank=0)(lambda shape: ())
    assert "empty" not in registry


def test_an_entry_point_is_loaded_when_its_name_is_asked_for(registry, monkeypatch):
    class Entry:
        name = "plugged"

        def load(self):
            register_schedule("plugged")(lambda shape: ((forward(0, 0), backward(0, 0)),))

    monkeypatch.setattr(schedules, "entry_points", lambda group: [Entry()])
    program = compile_program(schedule="plugged", pp=1, num_microbatches=1)
    assert compute_texts(program) == ["0F0 0B0"]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("loop", loop(4, 2)), ("v", v(4, 2)), ("bidirectional", bidirectional(4))],
)
def test_a_schedule_names_its_placement(placement, expected):
    schedule = Schedule("named", lambda shape: (), placement, stages_per_rank=2)
    assert schedule.place(Shape(4, 8, 2)) == expected


def test_defaults_are_filled_in():
    shape = SCHEDULES["interleaved_1f1b"].resolve(Plan("interleaved_1f1b", 4, 8))
    assert shape == Shape(4, 8, 2, group=4)
    shape = SCHEDULES["foldx_fifo"].resolve(Plan("foldx_fifo", 4, 8, 3))
    assert shape == Shape(4, 8, 3, group=None)


def test_groups_of_microbatches_leave_the_rest_of_a_shape_as_it_is():
    shape = SCHEDULES["interleaved_1f1b"].resolve(Plan("interleaved_1f1b", 4, 8, 2, accumulation=3))
    assert shape == Shape(4, 8, 2, group=4, accumulation=3)


def test_a_name_in_capitals_leads_to_one_that_is_near():
    with pytest.raises(PlanError, match=r"Did you mean schedule=gpipe"):
        find_schedule(" GPIPPE")
