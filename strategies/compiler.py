"""START HERE: plan -> schedule -> passes -> lowering, verified after each step.

    program = compile_program(schedule="foldx_fifo", pp=4, num_microbatches=8)
    print(format_rows(program.ranks))

Everything downstream (simulator, runtime, pictures) takes the programs made here; none has an order
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from strategies.errors import PlanError
from strategies.ir.program import Program, chain
from strategies.ir.verify import verify
from strategies.lowering.send_recv import add_messages
from strategies.passes.reduce_grad import add_grad_reduce, add_steps
from strategies.passes.variants import accumulate_only, forward_only
from strategies.plan import Overlap, Plan
from strategies.schedules import find_schedule


@dataclass(frozen=True, slots=True)
class Programs:
    """The three programs of one plan: same order, lowered and verified.

    Attributes:
        train: With reductions and optimizer steps.
        accumulate: Gradients only, for all but the last batch under gradient accumulation.
        forward: Forwards only, for validation, test and prediction.
    """

    train: Program
    accumulate: Program
    forward: Program


@lru_cache(maxsize=256)
def compile_plan(plan: Plan) -> Programs:
    """Makes and verifies all programs of a plan.

    Raises:
        PlanError: The plan breaks a rule of its schedule.
        ProgramError: The schedule (a user's own, say) made a program that cannot run.
    """
    compute = compile_compute(plan)
    stages = compute.placement.num_stages
    buckets = (plan.buckets,) * stages if isinstance(plan.buckets, int) else plan.buckets
    if len(buckets) != stages:
        raise PlanError(f"buckets={list(buckets)}: one number per stage is needed, here {stages}.")
    reduced = verify(add_grad_reduce(compute, buckets, overlap=plan.overlap == "grad_reduce"))
    train = verify(add_steps(reduced))
    lowered = verify(add_messages(train))
    _ = lowered.walk  # Derived once, here: replaying it is what searches do in a loop.
    return Programs(
        train=lowered,
        accumulate=verify(add_messages(verify(accumulate_only(train)))),
        forward=verify(add_messages(verify(forward_only(train)))),
    )


def compile_compute(plan: Plan) -> Program:
    """The schedule's bare order: F and B only, verified, no messages.

    Raises:
        PlanError: The plan breaks a rule of its schedule.
        ProgramError: The schedule made a program that cannot run.
    """
    schedule = find_schedule(plan.schedule)
    shape = schedule.resolve(
        pp=plan.pp,
        num_microbatches=plan.num_microbatches,
        stages_per_rank=plan.stages_per_rank,
        group=plan.group,
    )
    placement = schedule.place(shape)
    return verify(
        Program(
            schedule=schedule.name,
            placement=placement,
            num_microbatches=shape.num_microbatches,
            ranks=tuple(tuple(row) for row in schedule.order(shape)),
            boundaries=chain(placement.num_stages),
        )
    )


def compile_program(
    *,
    schedule: str = "1f1b",
    pp: int = 1,
    num_microbatches: int = 1,
    stages_per_rank: int | None = None,
    group: int | None = None,
    overlap: Overlap = "grad_reduce",
    buckets: int | tuple[int, ...] = 1,
) -> Program:
    """The training program of a plan given by keywords.

    Raises:
        PlanError: The plan breaks a rule of its schedule.
        ProgramError: The schedule made a program that cannot run.
    """
    plan = Plan(schedule, pp, num_microbatches, stages_per_rank, group, overlap, buckets)
    return compile_plan(plan).train


def with_microbatches(plan: Plan, num_microbatches: int) -> Plan:
    """The same plan for a batch that gives another number of microbatches (a short last batch)."""
    group = plan.group
    if group is not None:
        low, high = sorted((plan.pp, num_microbatches))
        group = min(max(group, low), high)
    return replace(plan, num_microbatches=num_microbatches, group=group)
