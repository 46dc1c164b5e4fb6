"""The quick walk gives the times and bytes of the verified program, on every schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from strategies.analysis.memory import peak_bytes, peak_memory
from strategies.compiler import compile_plan
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.load import Load
from strategies.errors import PlanError
from strategies.lowering.send_recv import add_messages
from strategies.plan import Overlap, Plan, Recompute, num_buckets
from strategies.planner.outcome import bytes_between, rank_bytes, shortened, worst_moments
from strategies.planner.step_time import build_order_graph, compute_program, step_time
from strategies.schedules import SCHEDULES
from strategies.simulator.engine import simulate
from tests.strategies.planner.models import MACHINE

SINGLE = sorted(
    name
    for name, schedule in SCHEDULES.items()
    if schedule.weight_copies == 1 and schedule.synchronous
)
CASES: tuple[tuple[int, int, int, Overlap, str], ...] = (
    (4, 8, 1, "grad_reduce", "none"),
    (3, 7, 2, "grad_reduce", "full"),
    (4, 9, 3, "zero1", "none"),
    (2, 5, 4, "none", "none"),
    (3, 8, 2, "zero1", "full"),
    (3, 6, 2, "grad_reduce", "mario"),
)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(("pp", "microbatches", "dp", "overlap", "policy"), CASES)
def test_times_and_bytes_are_those_of_the_compiled_program(
    name, pp, microbatches, dp, overlap, policy
):
    draw = random.Random(f"{name} {pp} {microbatches}")
    stages = pp * SCHEDULES[name].stages_per_rank
    loads = tuple(
        Load(
            1e9 * draw.uniform(0.5, 2),
            int(1e6 * draw.uniform(0.2, 3)),
            int(1e6 * draw.uniform(0.5, 2)),
            int(1e7 * draw.uniform(0.5, 2)),
        )
        for _ in range(stages)
    )
    costs = AnalyticCosts(loads, MACHINE, dp=dp)
    buckets = tuple(num_buckets(load.parameters * 4, 1.0) if dp > 1 else 0 for load in loads)
    plan = Plan(
        name, pp, microbatches, costs=costs, overlap=overlap, buckets=buckets,
        recompute=Recompute(policy),
    )  # fmt: skip
    try:
        programs = compile_plan(plan)
    except PlanError as error:
        pytest.skip(str(error))
    if programs.choice is not None:
        plan = replace(plan, group=programs.choice.group)
    timeline = simulate(programs.train, costs)
    lists = compute_program(plan)
    structure = build_order_graph(lists)
    shared = frozenset(range(stages)) if overlap == "zero1" else frozenset()
    table = costs.table_for(structure.draft, buckets, shared)
    times = step_time(structure, table, overlap=overlap != "none")
    assert times.makespan == pytest.approx(timeline.makespan, rel=1e-12)
    assert times.period == pytest.approx(timeline.period, rel=1e-12)
    held = peak_bytes(programs.train, costs.table(programs.train))
    assert rank_bytes(worst_moments(lists), table) == pytest.approx(held, abs=1)


LONG = (
    ("1f1b", 4, 33, None),
    ("eager_1f1b", 4, 30, None),
    ("interleaved_1f1b", 4, 34, 3),
    ("foldx_fifo", 4, 33, 2),
    ("chimera", 4, 34, None),
)


@pytest.mark.parametrize(("name", "pp", "microbatches", "stages_per_rank"), LONG)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_few_rounds_tell_what_ranks_hold(name, pp, microbatches, stages_per_rank, policy):
    """With two weight copies, too; of messages that are made at one time one more may be there."""
    draw = random.Random(f"{name} {policy}")
    stages = pp * (stages_per_rank or 1)
    loads = tuple(
        Load(1e9 * draw.uniform(1, 2), 10**6, 10**5 * draw.randint(5, 20), 10**7)
        for _ in range(stages)
    )
    costs = AnalyticCosts(loads, MACHINE)
    plan = Plan(
        name, pp, microbatches, stages_per_rank, costs=costs, buckets=0, recompute=Recompute(policy)
    )
    assert shortened(plan).num_microbatches < microbatches
    program = compile_plan(plan).train
    table = costs.table(program)
    held = peak_bytes(program, table)
    few = compute_program(shortened(plan))
    assert rank_bytes(worst_moments(few), table) == pytest.approx(held, abs=1)
    exact = [found.total for found in peak_memory(program, table)]
    message = max(load.output_elements for load in loads) * 4
    short = peak_memory(add_messages(few, table), table)
    assert [found.total for found in short] == pytest.approx(exact, abs=message)
    assert table.memory is not None
    bounds = bytes_between(worst_moments(few), table.memory)
    least, most = (max(each) for each in zip(*bounds, strict=True))
    assert least <= max(exact) <= most
    times = step_time(build_order_graph(compute_program(plan)), table, overlap=False)
    timeline = simulate(program, costs)
    assert times.makespan == pytest.approx(timeline.makespan, rel=1e-12)
    assert times.period == pytest.approx(timeline.period, rel=1e-12)
