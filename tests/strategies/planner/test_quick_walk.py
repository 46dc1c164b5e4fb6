"""The quick walk gives the times and bytes of the verified program, on every schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from strategies.analysis.memory import peak_bytes
from strategies.compiler import compile_plan
from strategies.costs.analytic import AnalyticCosts, Load
from strategies.errors import PlanError
from strategies.plan import Overlap, Plan, Recompute, num_buckets
from strategies.planner.quick_walk import build_structure, rank_bytes, step_time
from strategies.schedules import SCHEDULES
from strategies.simulator.engine import simulate
from tests.strategies.planner.models import MACHINE

SINGLE = sorted(name for name, schedule in SCHEDULES.items() if schedule.weight_copies == 1)
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
    structure = build_structure(plan)
    shared = frozenset(range(stages)) if overlap == "zero1" else frozenset()
    table = costs.table_for(structure.draft, buckets, shared)
    times = step_time(structure, table, overlap=overlap != "none")
    assert times.makespan == pytest.approx(timeline.makespan, rel=1e-12)
    assert times.period == pytest.approx(timeline.period, rel=1e-12)
    held = peak_bytes(programs.train, costs.table(programs.train))
    assert rank_bytes(structure, table) == pytest.approx(held, abs=1)
