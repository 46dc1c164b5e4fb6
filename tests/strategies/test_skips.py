"""Programs of models whose tensors skip stages: every schedule, verified and simulated."""

from __future__ import annotations

import pytest

from launcher.report.ascii import draw
from launcher.report.html import Panel
from launcher.report.predicted import trace_json
from strategies.compiler import compile_plan
from strategies.costs.uniform import UniformCosts
from strategies.ir.kinds import Kind
from strategies.ir.text import format_rows
from strategies.plan import Plan
from strategies.schedules import SCHEDULES
from strategies.simulator.engine import simulate

# Without a flush stages exchange messages with their neighbours only.
NAMES = [name for name, known in SCHEDULES.items() if name != "custom" and known.synchronous]


def plan(schedule: str, **more) -> Plan:
    costs = UniformCosts(p2p=0.25, transport=more.pop("transport", "buffered"))
    bare = Plan(schedule, 4, 8, costs=costs)
    stages = compile_plan(bare).train.placement.num_stages
    return Plan(schedule, 4, 8, costs=costs, skips=((0, stages - 1), (1, stages - 1)))


@pytest.mark.parametrize("transport", ["buffered", "rendezvous"])
@pytest.mark.parametrize("schedule", NAMES)
def test_each_skip_is_a_message_of_its_own_both_ways(schedule: str, transport: str) -> None:
    given = plan(schedule, transport=transport)
    for programs, role in ((compile_plan(given), "train"), (compile_plan(given, 3), "train")):
        program = getattr(programs, role)
        rank_of = program.placement.rank_of
        found = {
            (item.payload, item.stage, item.peer, item.microbatch)
            for row in program.ranks
            for item in row
            if item.kind is Kind.SEND and abs(item.stage - item.peer) > 1
        }
        wanted = {
            (payload, *(ends if payload is Kind.F else ends[::-1]), microbatch)
            for ends in given.skips
            for microbatch in range(program.num_microbatches)
            for payload in (Kind.F, Kind.B)
            if rank_of(ends[0], microbatch) != rank_of(ends[1], microbatch)
        }
        assert found == wanted
        bare = compile_plan(Plan(schedule, 4, 8, costs=given.costs)).train
        if program.num_microbatches == 8:
            timeline = simulate(program, given.costs)
            # What arrives early holds up nobody; where sends wait, two more may.
            shortest = simulate(bare, given.costs).makespan
            assert timeline.makespan >= shortest - 1e-9
            if transport == "buffered":
                assert timeline.makespan == pytest.approx(shortest)
            assert program.compute_rows() == bare.compute_rows() or SCHEDULES[schedule].cost_aware


def test_the_text_names_both_stages() -> None:
    program = compile_plan(Plan("1f1b", 4, 2, skips=((0, 3),))).train
    rows = format_rows(program.ranks)
    assert "0SEND_F0>3" in rows
    assert "3RECV_F0<0" in rows
    assert "3SEND_B0>0" in rows


def test_pictures_show_programs_with_skips() -> None:
    program = compile_plan(Plan("1f1b", 4, 4, skips=((0, 3),))).train
    timeline = simulate(program, UniformCosts())
    assert "3B3" in draw(timeline)
    assert "3B3" in trace_json([Panel("predicted", timeline)])
