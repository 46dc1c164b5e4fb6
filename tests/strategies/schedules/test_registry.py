from pathlib import Path

import pytest

import strategies.schedules as schedules
from strategies import compile_program
from strategies.errors import PlanError, ProgramError
from strategies.ir.instruction import backward, forward
from strategies.ir.placement import bidirectional, loop, v
from strategies.schedules import SCHEDULES, find_schedule, register_schedule
from strategies.schedules.schedule import Schedule, Shape
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


def test_a_registered_function_that_forgets_an_instruction_is_named(registry):
    register_schedule("forgetful")(lambda shape: ((forward(0, 0),),))
    with pytest.raises(ProgramError) as error:
        compile_program(schedule="forgetful", pp=1, num_microbatches=1)
    assert str(error.value) == (
        "forgetful: stage 0, microbatch 0 has F, a train program needs F and B, or F, I and W."
    )


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
    shape = SCHEDULES["interleaved_1f1b"].resolve(
        pp=4, num_microbatches=8, stages_per_rank=None, group=None
    )
    assert shape == Shape(4, 8, 2, group=4)
    shape = SCHEDULES["foldx_fifo"].resolve(pp=4, num_microbatches=8, stages_per_rank=3, group=None)
    assert shape == Shape(4, 8, 3, group=None)
