"""Listed plans fit with everything that their programs hold."""

from __future__ import annotations

from dataclasses import replace

from strategies.compiler import compile_plan
from strategies.memory_model import peak_memory_bytes
from strategies.planner.confirmed import search_confirmed
from strategies.planner.search import search
from strategies.planner.space import Space

from .models import problem


def test_a_plan_that_fits_only_without_its_buffers_makes_room_for_the_next():
    asked, space = problem(4), Space(4, 16, tp=1, pp=4, microbatch_size=1)
    best = search(asked, space, top_k=1).plans[0]
    assert best.plan.costs is not None
    program = compile_plan(best.plan).train
    whole = max(v or 0 for v in peak_memory_bytes(program, best.plan.costs.table(program)))
    assert best.peak_bytes < whole
    tight = replace(asked, machine=replace(asked.machine, memory_bytes=whole - 1))
    assert search(tight, space, top_k=1).plans[0].candidate == best.candidate
    answer = search_confirmed(tight, space, top_k=2)
    assert len(answer.plans) == 2
    assert best.candidate not in {plan.candidate for plan in answer.plans}
    assert all(plan.peak_bytes < whole for plan in answer.plans)
    assert answer.rejected.memory > 0


def test_figures_of_listed_plans_are_those_of_their_programs():
    asked = problem(4)
    answer = search_confirmed(asked, Space(8, 16), top_k=3)
    assert len(answer.plans) == 3
    for plan in answer.plans:
        assert plan.plan.costs is not None
        program = compile_plan(plan.plan).train
        assert plan.rank_bytes == peak_memory_bytes(program, plan.plan.costs.table(program))
