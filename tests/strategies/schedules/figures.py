"""What the schedules' tests look at: pictures, figures and refusals of a schedule in a shape."""

from __future__ import annotations

from functools import lru_cache

import pytest

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import Metrics, measure
from strategies.compiler import compile_compute
from strategies.costs.table import Costs
from strategies.errors import PlanError
from strategies.ir.program import Program
from strategies.ir.verify import verify
from strategies.lowering.send_recv import add_messages
from strategies.passes.updates import add_updates
from strategies.plan import Plan
from tests.strategies.programs import lines

# The compiler looks at costs for these: which pairs gain, which group is best.
COMPILED_FOR_COSTS = ("dualpipe", "dualpipe_v", "foldx")


@lru_cache(maxsize=512)
def compiled(
    schedule: str,
    pp: int,
    num_microbatches: int,
    stages: int | None = None,
    group: int | None = None,
    costs: Costs | None = None,
) -> Program:
    """The schedule's order with steps and messages, verified.

    Without reductions (which take no time in these tests) and without the programs that go with a
    training program: they cost two thirds of a compilation and have one order
    (``test_compiler.py``).
    """
    plan = Plan(schedule, pp, num_microbatches, stages, group, buckets=0, costs=costs)
    if schedule in COMPILED_FOR_COSTS:
        return compile_program(
            schedule=schedule,
            pp=pp,
            num_microbatches=num_microbatches,
            stages_per_rank=stages,
            group=group,
            buckets=0,
            costs=costs,
        )
    return verify(add_messages(add_updates(compile_compute(plan))))


def figures(
    schedule: str,
    pp: int,
    num_microbatches: int,
    stages: int | None = None,
    group: int | None = None,
    *,
    costs: Costs | None = None,
    made_for: Costs | None = None,
) -> Metrics:
    """Measured under ``costs``; the order itself is that for ``made_for``."""
    costs = costs or UniformCosts()
    program = compiled(schedule, pp, num_microbatches, stages, group, made_for)
    return measure(simulate(program, costs), costs)


def picture(
    schedule: str,
    pp: int,
    num_microbatches: int,
    stages: int | None = None,
    group: int | None = None,
    costs: Costs | None = None,
) -> list[str]:
    """Row by row, of the program as it is trained."""
    program = compile_program(
        schedule=schedule,
        pp=pp,
        num_microbatches=num_microbatches,
        stages_per_rank=stages,
        group=group,
    )
    return lines(draw(simulate(program, costs or UniformCosts())))


def refused(
    schedule: str,
    pp: int,
    num_microbatches: int,
    stages: int | None = None,
    group: int | None = None,
) -> str:
    """What is said against the shape; it must be refused."""
    with pytest.raises(PlanError) as error:
        compile_program(
            schedule=schedule,
            pp=pp,
            num_microbatches=num_microbatches,
            stages_per_rank=stages,
            group=group,
        )
    assert error.value.fix, "a refusal says what to type instead"
    return str(error.value)
