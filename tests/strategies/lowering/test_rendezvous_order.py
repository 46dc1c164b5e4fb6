import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program
from strategies.compiler import compile_compute
from strategies.ir import verify
from strategies.lowering.send_recv import add_messages, order_for_rendezvous
from strategies.passes.updates import accumulate_only
from strategies.plan import Plan
from strategies.simulator.engine import replay
from tests.strategies.programs import compute_texts, plans, texts


def lowered(plan, latency):
    """The compute program, in producer-time order and as chosen, and their times."""
    program = accumulate_only(compile_compute(plan))
    table = UniformCosts(p2p=latency, transport="rendezvous").table(program)
    by_producer, chosen = add_messages(program, table), order_for_rendezvous(program, table)
    times = [max(replay(candidate, table)[1]) for candidate in (by_producer, chosen)]
    return program, chosen, times


@settings(max_examples=40)
@given(plans(max_pp=5, max_microbatches=8), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_chosen_order_is_safe_and_never_slower(plan, latency):
    program, chosen, (by_producer, time) = lowered(plan, latency)
    assert verify(chosen) is chosen
    assert compute_texts(chosen) == compute_texts(program)
    assert time <= by_producer * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "foldx_aiao"])
def test_it_takes_most_of_what_waiting_for_a_busy_receiver_costs(schedule):
    _, _, (by_producer, time) = lowered(Plan(schedule, 4, 8), 0.05)
    buffered = replay(*_buffered(schedule))[1]
    assert by_producer > 1.4 * max(buffered)
    assert time < 1.15 * max(buffered)


def _buffered(schedule):
    program = compile_program(schedule=schedule, pp=4, num_microbatches=8, buckets=0)
    return program, UniformCosts(p2p=0.05).table(program)


def test_the_compiler_takes_it_for_costs_with_rendezvous():
    waiting = UniformCosts(p2p=0.05, transport="rendezvous")
    plan = Plan("1f1b", 4, 8, buckets=0, costs=waiting)
    compiled = compile_program(schedule="1f1b", pp=4, num_microbatches=8, buckets=0, costs=waiting)
    _, chosen, _ = lowered(plan, 0.05)
    without_updates = [
        " ".join(word for word in row.split() if "STEP" not in word) for row in texts(compiled)
    ]
    assert without_updates == texts(chosen)
