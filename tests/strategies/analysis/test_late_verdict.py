from dataclasses import replace

import pytest

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.late_verdict import (
    gains_time,
    post_validation_pays,
    receives_to_discard,
    speculation_limits,
    with_undo_buffers,
)
from strategies.analysis.memory import peak_memory_bytes
from strategies.costs.analytic import AnalyticCosts
from strategies.ir.kinds import GRADIENT_KINDS, Kind
from tests.strategies.costs.test_analytic import MACHINE, STAGES
from tests.strategies.programs import ALL_SCHEDULES


def ends(item):
    return (item.stage, item.peer) if item.kind is Kind.SEND else (item.peer, item.stage)


def program_of(schedule, pp=4):
    return compile_program(schedule=schedule, pp=pp, num_microbatches=2 * pp)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_before_the_cut_stand_forwards_that_others_may_count_on(schedule):
    program = program_of(schedule)
    cuts = speculation_limits(program)
    last = program.placement.num_stages - 1
    before = [row[:cut] for row, cut in zip(program.ranks, cuts, strict=True)]
    sent = {
        (*ends(item), item.microbatch, item.payload)
        for row in before
        for item in row
        if item.kind is Kind.SEND
    }
    for rank, (row, done) in enumerate(zip(program.ranks, before, strict=True)):
        assert all(part.kind not in GRADIENT_KINDS for item in done for part in item.parts)
        assert not any(item.kind is Kind.F and item.stage == last for item in done)
        forwards = [item for item in row if any(part.kind is Kind.F for part in item.parts)]
        assert any(item not in done for item in forwards)
        received = [item for item in done if item.kind is Kind.RECV]
        crossing = receives_to_discard(program, rank)
        assert set(received) <= set(crossing)
        for item in row:
            if item.kind is Kind.RECV:
                name = (*ends(item), item.microbatch, item.payload)
                assert (name in sent) == (item in crossing)


def test_steps_get_shorter_where_the_period_is_below_the_makespan():
    shorter = {
        schedule
        for schedule in ("1f1b", "gpipe", "zb_h1", "zb_h2", "zb_v", "interleaved_1f1b")
        if gains_time(simulate(program_of(schedule), UniformCosts(1, 2)))
    }
    assert shorter == {"zb_h2", "zb_v"}


def test_copies_are_in_the_memory_and_have_to_fit_and_to_pay():
    program = compile_program(schedule="zb_h2", pp=3, num_microbatches=8)
    even = tuple(replace(STAGES[0], forward_flops=1000, output_elements=1) for _ in range(3))
    costs = AnalyticCosts(even, replace(MACHINE, memory_bandwidth=1e12, intra_bandwidth=1e12))
    kept = with_undo_buffers(costs)
    waits, keeps = costs.table(program), kept.table(program)
    # Weights and two moments of 4 bytes, again.
    more = [b - a for a, b in zip(waits.state_bytes, keeps.state_bytes, strict=True)]
    assert more == [3 * 4 * stage.parameters for stage in even]
    timeline = simulate(program, costs)
    assert gains_time(timeline)
    most = max(peak_memory_bytes(program, keeps))
    assert post_validation_pays(timeline, costs, memory_bytes=most)
    assert post_validation_pays(timeline, costs, memory_bytes=None)
    assert not post_validation_pays(timeline, costs, memory_bytes=most - 1)
    slow = replace(costs, hardware=replace(costs.hardware, memory_bandwidth=1.0))
    assert not post_validation_pays(timeline, slow, memory_bytes=None)


def test_uniform_costs_know_of_no_memory():
    costs = UniformCosts(1, 2)
    assert with_undo_buffers(costs) is costs
    assert post_validation_pays(simulate(program_of("zb_v"), costs), costs, memory_bytes=None)
