"""Which candidates there are: what a user has pinned stays, all else is listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from strategies.errors import PlanError
from strategies.passes.group_choice import group_candidates
from strategies.plan import NO_RECOMPUTE, Overlap, Plan, Policy, Recompute
from strategies.planner.problem import Layout, Order, Problem
from strategies.schedules import SCHEDULES, Schedule, find_schedule

Level = Literal["O2", "O3"]

# O2 leaves out what others dominate, such as schedules with all activations.
_COMMON = (
    "1f1b", "eager_1f1b", "interleaved_1f1b", "foldx_fifo", "chimera", "zb_h2", "zb_h1", "zb_v",
)  # fmt: skip
# Their orders take long to find: O2 tries them only where nothing else fits into memory.
_LEAN = ("v_half", "v_min")
# Orders that are made for given costs are themselves searched for, in seconds where they are long,
# and gain little there: O2 leaves out those with more forwards than this.
_LONGEST_MADE = 1024
# With recompute=mario, whose passes take longer than an order.
_LONGEST_MARIO = 512
# Nor does it look for two weight copies, or more stages per rank than four, in longer ones than
# this: of those there are many, and the others are looked at for all of them.
_LONGEST = 4096
# Without a flush, where that is allowed: the one that takes batches of several microbatches.
_LATE = "pipedream_2bw"
# These hold less than the schedule named and are no faster: O2 tries them where that one does not
# fit into memory.
DOMINATED_BY = {
    "zb_h1": "zb_h2", "v_half": "zb_v", "v_min": "v_half", "foldx_fifo": "interleaved_1f1b",
}  # fmt: skip
# Stages per rank that O2 tries besides those that divide a rank's layers; O3 tries all up to them.
_VIRTUAL: dict[Level, tuple[int, ...]] = {"O2": (2, 3, 4), "O3": tuple(range(1, 9))}
_MICROBATCHES: dict[Level, tuple[int, ...]] = {"O2": (1, 2, 4, 8), "O3": tuple(range(1, 65))}


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen.

    Attributes:
        num_gpus: tp * pp * dp.
        global_batch_size: Sequences per optimizer step.
        level: ``O2`` with heuristics, ``O3`` everything that the registry has.
        tp: Pinned degree, None for a free one; likewise all that follow up to ``recompute``.
        units: Units per stage, pinned.
        split_backward: Pinned: split the backwards of schedules that do not by themselves.
        whole_backward: Pinned: no schedule that splits backwards by itself.
        balance_ratio: Cuts send the least bytes as long as no stage takes more than that many times
            an equal share; None for the fastest slowest stage first.
        lean: Whether O2 looks at the schedules that are made for little memory.
        selective: Whether layers can recompute selectively.
        policies: What is tried where ``recompute`` is free; None for what the level has.
        sizes: Microbatch sizes that are tried where that is free; None for what the level has.
        ep: Pinned expert degree; None for all that the experts and ranks of a stage allow.
        asynchronous: Whether gradients may be late: schedules without a flush are taken.
    """

    num_gpus: int
    global_batch_size: int
    level: Level = "O2"
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    microbatch_size: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    group: int | None = None
    overlap: Overlap | None = None
    recompute: Recompute | None = None
    units: tuple[int, ...] | None = None
    split_backward: bool = False
    whole_backward: bool = False
    balance_ratio: float | None = None
    lean: bool = False
    selective: bool = True
    policies: tuple[Recompute, ...] | None = None
    sizes: tuple[int, ...] | None = None
    ep: int | None = None
    asynchronous: bool = False

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Policies, those that hold more first."""
        if self.recompute is not None:
            return (self.recompute,)
        if self.policies is not None:
            return self.policies
        policies: tuple[Policy, ...] = ("none", "selective", "mario", "full")
        return tuple(Recompute(p) for p in policies if self.selective or p != "selective")

    def overlaps(self, layout: Layout) -> tuple[Overlap, ...]:
        """When gradients are reduced, where there is anybody to reduce with."""
        if self.overlap is not None:
            return (self.overlap,)
        return ("grad_reduce", "zero1") if layout.dp > 1 else ("grad_reduce",)


def degrees(space: Space, problem: Problem) -> Iterator[tuple[int, int, int]]:
    """All (tp, pp, dp) that multiply to the number of GPUs, whatever model and batch say."""
    node = problem.machine.hardware.gpus_per_node
    for tp in (n for n in range(1, min(space.num_gpus, node) + 1) if space.num_gpus % n == 0):
        shares = problem.machine.sequence_parallel or problem.expert_tp
        if space.tp not in (None, tp) or (shares and tp == 1):
            continue
        rest = space.num_gpus // tp
        for pp in (n for n in range(1, min(rest, problem.num_units) + 1) if rest % n == 0):
            if space.pp in (None, pp) and space.dp in (None, rest // pp):
                yield tp, pp, rest // pp


def splits_node(space: Space, problem: Problem, tp: int) -> str | None:
    """Why O2 leaves out a degree that is not asked for; None for one that divides nodes evenly."""
    node = problem.machine.hardware.gpus_per_node
    if node % tp == 0 or space.level != "O2" or space.tp is not None:
        return None
    return f"does not divide hardware.gpus_per_node={node}, so its sums would leave a node"


def layouts(space: Space, problem: Problem, tp: int, pp: int, dp: int) -> list[Layout]:
    """Layouts of the batch for these degrees; none where dp does not divide it."""
    if space.global_batch_size % dp:
        return []
    rows = space.global_batch_size // dp
    tried = _MICROBATCHES[space.level] if space.sizes is None else space.sizes
    sizes = [n for n in tried if n <= rows]
    if space.microbatch_size is not None:
        sizes = [space.microbatch_size]
    found = [
        Layout(tp, pp, dp, size, rows // size, ep)
        for size in sizes
        if rows % size == 0 and space.num_microbatches in (None, rows // size)
        for ep in expert_degrees(space, problem, tp, dp)
    ]
    if space.num_microbatches is not None and space.microbatch_size is None:
        size, left = divmod(rows, space.num_microbatches)
        found = [
            Layout(tp, pp, dp, size, space.num_microbatches, ep)
            for ep in (() if left else expert_degrees(space, problem, tp, dp))
        ]
    return found


def expert_degrees(space: Space, problem: Problem, tp: int, dp: int) -> list[int]:
    """Degrees that divide the experts of a layer and the ranks of a stage.

    Where ranks that share matrices share those of each expert, the replicas are left to spread
    experts over; none where both do not go together.

    Of these O2 tries none at all, the most ranks of a node, and the most of all: what lies between
    holds more and exchanges over the same links.
    """
    places = dp if problem.expert_tp else tp * dp
    if tp > 1 and not problem.spreads_cut:
        places = 1
    most = min(max(problem.num_experts, 1), places)
    found = [n for n in range(1, most + 1) if (problem.num_experts or 1) % n == places % n == 0]
    if space.ep is not None:
        return [space.ep] if space.ep in found else []
    if space.level == "O3":
        return found
    node = problem.machine.hardware.gpus_per_node
    return sorted({1, max(n for n in found if n <= node), found[-1]})


def orders(
    space: Space, problem: Problem, layout: Layout, recompute: Recompute = NO_RECOMPUTE
) -> list[Order]:
    """Schedules with all numbers of stages that the model has layers for."""
    mario = recompute.policy == "mario" and space.recompute is None
    # Experts that ranks share are updated by all of them together.
    shared = layout.ep > 1 or (layout.tp > 1 and problem.num_experts > 0)
    flushes = shared or recompute.policy in ("mario", "optimal")
    return [
        order
        for order in _orders(space, problem.num_units, layout, mario)
        if not (flushes and order.schedule == _LATE)
    ]


@lru_cache(maxsize=4096)
def _orders(space: Space, num_units: int, layout: Layout, mario: bool) -> tuple[Order, ...]:
    if space.schedule is not None:
        names: tuple[str, ...] = (space.schedule,)
    elif layout.pp == 1:
        names = ("1f1b",)
    else:
        names = tuple(SCHEDULES) if space.level == "O3" else _COMMON
        names = (*(n for n in names if find_schedule(n).synchronous), _LATE)
        if space.lean:
            names = (*names, *(name for name in _LEAN if name not in names))
    found = []
    for name in names:
        schedule = find_schedule(name)
        whole = space.split_backward or space.whole_backward
        if not _may_be_late(space, schedule, layout) or (whole and schedule.splits_backward):
            continue
        made = schedule.cost_aware or not schedule.synchronous
        for stages in _stages_per_rank(space, num_units, schedule, layout):
            length = layout.pp * layout.num_microbatches * stages
            free = space.level == "O2" and space.schedule is None
            rare = schedule.weight_copies > 1 or stages > _VIRTUAL["O2"][-1]
            most = _LONGEST_MADE if made else _LONGEST if rare else length
            if free and length > (min(most, _LONGEST_MARIO) if mario else most):
                continue
            for group in _groups(space, schedule, layout):
                if _possible(space, num_units, schedule, layout, stages, group):
                    found.append(Order(name, stages, group))
    return tuple(found)


def leaves_made_out(space: Space, layout: Layout) -> str | None:
    """Which orders that are made for given costs were not tried for a layout, and why."""
    if space.level != "O2" or space.schedule is not None or layout.pp == 1:
        return None
    length = layout.pp * layout.num_microbatches
    made = [name for name in _COMMON if find_schedule(name).cost_aware]
    names = [n for n in made if length * find_schedule(n).stages_per_rank > _LONGEST_MADE]
    if not names:
        return None
    return (
        f"not tried for plan 1: {', '.join(names)}, made for their costs, of more than "
        f"{_LONGEST_MADE:,} forwards (pp x microbatches x stages per rank). "
        f"Try planner.level=O3, or schedule={names[-1]}"
    )


def _may_be_late(space: Space, schedule: Schedule, layout: Layout) -> bool:
    """Whether a schedule without a flush may be a plan; there is none to spare on one rank."""
    if schedule.synchronous:
        return True
    alone = layout.pp == 1 or space.split_backward
    return space.asynchronous and schedule.name == _LATE and not alone


def _stages_per_rank(
    space: Space, num_units: int, schedule: Schedule, layout: Layout
) -> tuple[int, ...]:
    if space.stages_per_rank is not None:
        return (space.stages_per_rank,)
    if not schedule.virtual_stages or layout.pp == 1:
        return (schedule.stages_per_rank,)
    layers = num_units // 2 // layout.pp  # of attention and MLP each
    if space.level == "O3":
        return tuple(range(1, max(layers, *_VIRTUAL["O3"]) + 1))
    even = (v for v in range(5, layers + 1) if layers % v == 0)
    return (*_VIRTUAL["O2"], *even)


def _groups(space: Space, schedule: Schedule, layout: Layout) -> tuple[int | None, ...]:
    if not schedule.grouped:
        return (None,)
    if space.group is not None:
        return (space.group,)
    if space.level == "O2" and not schedule.chooses_group:
        return (None,)
    low = min(layout.pp, layout.num_microbatches)
    return tuple(group_candidates(low, layout.num_microbatches))


def _possible(
    space: Space, num_units: int, schedule: Schedule, layout: Layout, stages: int,
    group: int | None,
) -> bool:  # fmt: skip
    try:
        shape = schedule.resolve(
            Plan(schedule.name, layout.pp, layout.num_microbatches, stages, group)
        )
    except PlanError:
        return False
    count = schedule.place(shape).num_stages
    if space.units is not None:
        return len(space.units) == count
    return count <= num_units
