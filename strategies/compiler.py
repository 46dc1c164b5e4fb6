"""START HERE: plan -> schedule -> passes -> lowering, verified after each step.

    program = compile_program(schedule="foldx_fifo", pp=4, num_microbatches=8)
    print(format_rows(program.ranks))

Everything downstream (simulator, runtime, pictures) takes the programs made here; none has an order
of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from typing import Any, Literal

from strategies.analysis.memory import peak_memory_bytes
from strategies.costs.table import Costs
from strategies.costs.uniform import UniformCosts
from strategies.errors import DeadlockError, PlanError, ProgramError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.ir.program import Boundary, Program, Updates, chain
from strategies.ir.verify import verify
from strategies.keyword_types import check_keywords
from strategies.lowering.send_recv import add_messages, order_for_rendezvous
from strategies.lowering.steps import StreamSteps, first_steady, num_batches, slots_per_cycle
from strategies.passes.group_choice import GroupChoice, choose_group, group_candidates
from strategies.passes.recompute.add_recompute import add_recompute
from strategies.passes.split_backward import split_backward
from strategies.passes.updates import (
    accumulate_only,
    add_batch_loss,
    add_updates,
    first_microbatches,
    forward_only,
    forwards_first,
    fuse_pairs,
    separate_pairs,
)
from strategies.plan import NO_RECOMPUTE, Overlap, Plan, Recompute, ScheduleFile
from strategies.rules import check
from strategies.schedules import Durations, Rows, Schedule, Shape, find_schedule
from strategies.schedules.schedule import parse_group
from strategies.schedules.search.best_order import equal_durations


@contextmanager
def no_collection() -> Iterator[None]:
    """Programs are many tuples without a cycle: the collector would walk them for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Programs:
    """The programs of one plan: same order, lowered and verified.

    Simulations, plans and pictures need the first; the others are made when they are first used.

    Attributes:
        train: With reductions and optimizer steps; of a schedule without a flush a few batches,
            from an empty pipeline to an empty one.
        choice: How the group of microbatches was chosen, where the plan left it to us.
        stream: Without a flush, what each training step runs; None with one.
    """

    train: Program
    choice: GroupChoice | None
    _batch: Program  # One batch with its update, before it was lowered.
    _costs: Costs | None
    stream: StreamSteps | None = None

    @cached_property
    def single_batch(self) -> Program:
        """One batch by itself, from an empty pipeline to an empty one, with its update."""
        return self.train if self.stream is None else self._lowered(self._batch)

    @cached_property
    def accumulate(self) -> Program:
        """Gradients only, for all but the last batch under gradient accumulation."""
        return self._lowered(verify(accumulate_only(self._batch)))

    @cached_property
    def forward(self) -> Program:
        """Forwards only, for validation, test and prediction."""
        return self._lowered(verify(forward_only(self._batch)))

    @no_collection()
    def _lowered(self, program: Program) -> Program:
        return verify(lower(program, self._costs))

    @property
    def all(self) -> tuple[Program, ...]:
        """All that may run, proven: what has to hold before the first step.

        Raises:
            ProgramError: One of them cannot run.
        """
        one = () if self.stream is None else (self.single_batch,)
        return self.train, *one, self.accumulate, self.forward


@lru_cache(maxsize=256)
@no_collection()
def compile_plan(plan: Plan, num_microbatches: int | None = None) -> Programs:
    """Makes and verifies all programs of a plan.

    Args:
        plan: What is compiled.
        num_microbatches: For a batch that gives fewer than the plan's (a short last one).

    Raises:
        PlanError: The plan breaks a rule of its schedule.
        ProgramError: The schedule (a user's own, say) made a program that cannot run.
    """
    schedule, choice, short = schedule_of(plan), None, num_microbatches is not None
    if schedule.chooses_group and plan.group is None:
        choice = compile_plan(plan).choice if short else _choose_group(plan)
        assert choice is not None
        plan = replace(plan, group=choice.group)
    compute = compile_compute(plan)
    if num_microbatches is not None:
        compute = verify(first_microbatches(compute, num_microbatches))
    elif not schedule.synchronous:
        return _streamed(compute, plan)
    batch = _train(compute, plan)
    train = verify(lower(batch, plan.costs))
    _ = train.flat  # Derived once, here: replaying it is what searches do in a loop.
    return Programs(train, choice, batch, plan.costs)


def compile_compute(plan: Plan, *, stream: int | None = None) -> Program:
    """The schedule's order with recomputation and split backwards, verified; compute only.

    Args:
        plan: What is compiled.
        stream: Without a flush, for so many microbatches, with the updates between them.

    Raises:
        PlanError: The plan breaks a rule of its schedule.
        ProgramError: The schedule made a program that cannot run.
    """
    compute = _ordered(plan, stream)
    updates = _updates(plan)
    if stream is not None:
        compute = replace(compute, updates=updates)
    _check_compute(compute)
    if plan.split_backward:
        compute = verify(split_backward(compute, _durations(plan, compute)))
    if plan.recompute.rewrites:
        compute = add_recompute(
            _paired(compute, plan),
            plan.recompute,
            plan.costs,
            memory_bytes=plan.memory_bytes,
            held=lambda program: _held(program, plan),
            reorder=plan.file is None,
            period=None if updates is None else slots_per_cycle(updates),
        )
    return compute


@no_collection()
def order_compute(plan: Plan) -> Program:
    """The schedule's bare order without a check, for searches that look at dozens of them.

    What is chosen is compiled and verified like any plan. Neither ``split_backward`` nor
    ``recompute`` of the plan are applied; fused pairs are taken apart unless they gain.
    """
    compute = _ordered(plan)
    if plan.pairs:
        return fuse_pairs(compute)
    pairs = any(any(map(_HALVES, row)) for row in compute.ranks)
    return separate_pairs(compute) if pairs and not _pairs_gain(plan, compute) else compute


def lower(program: Program, costs: Costs | None) -> Program:
    """With messages."""
    # Without a flush the places of messages repeat, whatever these cost.
    table = None if costs is None or program.updates is not None else costs.table(program)
    if table is not None and table.transport == "rendezvous":
        return order_for_rendezvous(program, table)
    return add_messages(program, table)


def schedule_of(plan: Plan) -> Schedule:
    """The plan's entry in the registry, or its file as one."""
    return find_schedule(plan.schedule, file=plan.file, pp=plan.pp)


def resolve_shape(plan: Plan) -> Shape:
    """The plan's degrees with defaults filled in, after all that can be refused at once."""
    check(plan)
    return schedule_of(plan).resolve(plan)


def compile_program(
    *,
    schedule: str = "1f1b",
    pp: int = 1,
    num_microbatches: int | None = None,
    stages_per_rank: int | None = None,
    group: int | Literal["auto"] | None = None,
    overlap: Overlap = "grad_reduce",
    buckets: int | tuple[int, ...] = 1,
    split_backward: bool = False,
    costs: Costs | None = None,
    file: ScheduleFile | None = None,
    recompute: Recompute = NO_RECOMPUTE,
    vertical_sync: bool = False,
    error_feedback: float = 0.0,
) -> Program:
    """The training program of a plan given by keywords.

    ``num_microbatches`` is 1 if left out, or what ``file`` (for ``schedule="custom"``) has.

    Raises:
        PlanError: The plan breaks a rule of its schedule.
        ProgramError: The schedule made a program that cannot run.
    """
    given: dict[str, Any] = locals()
    check_keywords(compile_program, given)
    found = find_schedule(schedule, file=file, pp=pp)
    if num_microbatches is None:
        given["num_microbatches"] = found.num_microbatches or 1
    return compile_plan(Plan(**given | {"group": parse_group(group, found)})).train


# -------------------------------------------------------------------------------------- the order

_HALVES = attrgetter("halves")  # read from hundreds of thousands of instructions


def _ordered(plan: Plan, stream: int | None = None) -> Program:
    """What the schedule returns, unchecked."""
    schedule = schedule_of(plan)
    shape = resolve_shape(plan)
    if stream is not None:
        shape = replace(shape, num_microbatches=stream)
    placement = schedule.place(shape)
    assert all(a + 1 < b < placement.num_stages for a, b in plan.skips)
    links = chain(placement.num_stages) + tuple(Boundary(*ends) for ends in plan.skips)
    rows: Rows = ((),) * placement.num_ranks
    draft = Program(
        schedule.name, placement, shape.num_microbatches, rows, links, exchanges=plan.exchanges
    )
    if schedule.cost_aware and plan.costs is not None:
        shape = replace(shape, durations=_durations(plan, draft))
    rows = schedule.order(shape) if plan.file is not None else _order(schedule, shape)
    if not isinstance(rows, list | tuple) or not all(isinstance(r, list | tuple) for r in rows):
        raise ProgramError(
            f"{schedule.name}: its order is no list of instructions per rank. Return a tuple with "
            f"{placement.num_ranks} tuples."
        )
    ordered = draft.with_ranks(tuple(map(tuple, rows)))
    return _for_batch_loss(ordered, plan) if plan.loss_over == "batch" else ordered


@lru_cache(maxsize=32)
def _order(schedule: Schedule, shape: Shape) -> Rows:
    """Of plans that differ in buckets or policies the order is one."""
    return schedule.order(shape)


def _durations(plan: Plan, program: Program) -> Durations:
    if plan.costs is None:
        return equal_durations(program.placement)
    table = plan.costs.table(program)
    latency = max(table.hops, default=0.0)
    return Durations(table.forward, table.backward_input, table.backward_weight, latency)


def _for_batch_loss(program: Program, plan: Plan) -> Program:
    """The order in which the loss can stand behind all forwards; a user's own stays as it is."""
    moved = forwards_first(_check_compute(program))
    if plan.file is not None and moved.ranks != program.ranks:
        raise PlanError(
            f"loss_over=batch: schedule.file={plan.file.name} has backwards before the last "
            "forward of a rank, and no gradient exists before all forwards have run. Put each "
            "rank's forwards first, or try loss_over=microbatch."
        )
    return moved


def _check_compute(program: Program) -> Program:
    """``verify``, of a schedule's order."""
    for rank, row in enumerate(program.ranks):
        for item in row:
            if isinstance(item, Instruction) and item.kind not in MICROBATCH_KINDS:
                raise ProgramError(
                    f"{program.schedule}: rank {rank} has {item}. A schedule orders forwards and "
                    "backwards; the compiler adds messages, reductions and optimizer steps. Leave "
                    "them out."
                )
    return verify(program)


def _choose_group(plan: Plan) -> GroupChoice:
    costs = plan.costs or UniformCosts()
    if plan.recompute.policy in ("mario", "optimal"):
        # These passes search; the groups differ in what they are applied to.
        plan = replace(plan, recompute=NO_RECOMPUTE)

    def build(group: int) -> Program:
        return lower(_train(compile_compute(replace(plan, group=group)), plan), costs)

    groups = group_candidates(min(plan.pp, plan.num_microbatches), plan.num_microbatches)
    return choose_group(groups, build, costs, memory_bytes=plan.memory_bytes)


# ------------------------------------------------------------------------- pairs, loss and updates


def _train(compute: Program, plan: Plan) -> Program:
    """With reductions and optimizer steps, not lowered; verified once it is, with its messages."""
    stages = compute.placement.num_stages
    buckets = plan.stage_buckets(stages)
    if len(buckets) != stages:
        raise PlanError(f"buckets={list(buckets)}: one number per stage is needed, here {stages}.")
    compute = _paired(compute, plan)
    if plan.loss_over == "batch":
        compute = add_batch_loss(compute)
    return add_updates(
        compute, buckets, overlapped=plan.overlap != "none", gathered=plan.overlap == "zero1"
    )


def _paired(compute: Program, plan: Plan) -> Program:
    """Fused pairs are made where the plan says so; else they stay where it gains something."""
    if plan.pairs and compute.updates is None:
        try:
            return verify(fuse_pairs(compute))
        except DeadlockError as error:
            raise PlanError(
                f"overlap.exchange=true: in {plan.schedule} with pp={plan.pp} and "
                f"num_microbatches={plan.num_microbatches} a backward has to end before the "
                "forward behind it can begin, so the two cannot run as one. Try "
                "schedule=eager_1f1b, interleaved_1f1b, zb_v or dualpipe."
            ) from error
    if any(item.halves for row in compute.ranks for item in row) and not _pairs_gain(plan, compute):
        return separate_pairs(compute)
    return compute


def _pairs_gain(plan: Plan, compute: Program) -> bool:
    return plan.costs is not None and plan.costs.table(compute).fused < 1.0


def _held(compute: Program, plan: Plan) -> tuple[int | None, ...]:
    """Bytes per rank at its worst moment, once there are updates and messages."""
    assert plan.costs is not None
    train = lower(_train(compute, plan), plan.costs)
    return peak_memory_bytes(train, plan.costs.table(train))


def _updates(plan: Plan) -> Updates | None:
    """Without a flush: when the weights are updated."""
    updates = schedule_of(plan).updates
    if updates is None:
        return None
    return replace(updates(resolve_shape(plan)), feeds_back=plan.error_feedback > 0)


def _streamed(compute: Program, plan: Plan) -> Programs:
    """Of a schedule without a flush: as many batches as show how it begins, goes on and ends."""
    updates, gathers = _updates(plan), plan.overlap == "zero1"
    assert updates is not None
    batch = verify(_train(compute, plan))
    count = num_batches(updates, gathers=gathers) * updates.per_step
    over = partial(_stream, plan, compile_compute(plan, stream=count))
    steps = StreamSteps(verify(over(count)), first_steady(updates, gathers=gathers), over)
    return Programs(steps.program, None, batch, plan.costs, steps)


def _stream(plan: Plan, compute: Program, count: int, begun: int = 0) -> Program:
    """Lowered, over so many microbatches, of which the first update has so many others already."""
    assert compute.updates is not None
    updates = replace(compute.updates, begun=begun)
    compute = replace(first_microbatches(compute, count), updates=updates)
    return lower(_train(compute, plan), plan.costs)
