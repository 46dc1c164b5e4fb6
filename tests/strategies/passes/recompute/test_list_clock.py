import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts
from strategies.compiler import compile_compute
from strategies.lowering.send_recv import add_messages
from strategies.passes.recompute.list_clock import ListClock
from strategies.passes.recompute.mario import apply_checkpoint
from strategies.plan import Plan
from strategies.simulator.engine import simulate
from tests.strategies.programs import written

COSTS = UniformCosts(p2p=0.3)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "chimera", "zb_v", "dualpipe"])
def test_it_agrees_with_the_simulator(schedule):
    program = apply_checkpoint(compile_compute(Plan(schedule, 4, 8)))
    clock = ListClock(program, COSTS.table(program))
    assert clock.makespan == pytest.approx(simulate(add_messages(program), COSTS).makespan)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_a_move_gives_the_times_of_the_moved_lists_and_can_be_undone(data):
    program = compile_compute(Plan("1f1b", 3, 5))
    table = COSTS.table(program)
    clock = ListClock(program, table)
    before = list(clock.start)
    node = data.draw(st.integers(0, len(clock.items) - 1))
    place = clock.place(node)
    if not place:
        return
    changed = clock.hoist(node, data.draw(st.integers(0, place - 1)))
    if changed is None:
        assert clock.start == before
        return
    fresh = ListClock(program.with_ranks(clock.lists()), table)
    found = dict(zip(map(str, clock.items), clock.start, strict=True))
    wanted = dict(zip(map(str, fresh.items), fresh.start, strict=True))
    assert found == pytest.approx(wanted)
    assert clock.cost == pytest.approx(fresh.cost)
    clock.put_back(node, place, changed)
    assert clock.start == before
    assert clock.lists() == program.ranks


def test_lists_that_cannot_run_are_refused_and_left_alone():
    program = written("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1", num_microbatches=2)
    clock = ListClock(program, COSTS.table(program))
    backward = next(n for n, item in enumerate(clock.items) if str(item) == "0B0")
    assert clock.hoist(backward, 0) is None
    assert clock.lists() == program.ranks
