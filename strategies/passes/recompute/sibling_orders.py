"""Orders of other schedules on the same placement: starts for what recomputes under a limit.

A schedule that holds little by itself (v_min, v_half) needs less recomputation under a small limit
than one that is faster without any, and its regular order is one that small moves do not find.
"""

from __future__ import annotations

from itertools import chain as joined

from strategies.errors import PlanError
from strategies.ir.instruction import Instruction, Kind
from strategies.ir.program import Program
from strategies.schedules import SCHEDULES, Schedule

# Of long programs: the order that holds least of all.
_LEAN = ("v_min",)
_ALL = (
    *_LEAN, "v_half", "zb_v", "zb_h1", "zb_h2", "interleaved_zb", "hanayo", "gpipe", "1f1b",
    "eager_1f1b", "interleaved_1f1b", "looped_bfs", "foldx_fifo", "foldx_aiao", "chimera",
)  # fmt: skip


def sibling_orders(program: Program, *, every: bool) -> list[Program]:
    """Other schedules' orders of the same stages, microbatches and kinds of backwards.

    Orders made for costs are taken as they are for equal ones, which are quickly made.

    Args:
        program: Compute only: F and B, or F, I and W.
        every: Whether all schedules are asked, or only those that are there for memory.
    """
    kinds = {part.kind for row in program.ranks for item in row for part in item.parts}
    found: dict[tuple[tuple[Instruction, ...], ...], Program] = {}
    for name in _ALL if every else _LEAN:
        schedule = SCHEDULES.get(name)
        if schedule is None or name == program.schedule:
            continue
        rows = _rows(schedule, program)
        if rows is None or rows == program.ranks or rows in found:
            continue
        if {part.kind for item in joined(*rows) for part in item.parts} == kinds:
            found[rows] = program.with_ranks(rows)
    return list(found.values())


def _rows(schedule: Schedule, program: Program) -> tuple[tuple[Instruction, ...], ...] | None:
    """The schedule's lists; None where it has other stages or rules against the numbers."""
    placement = program.placement
    splits = any(item.kind is Kind.W for row in program.ranks for item in row)
    stages = placement.num_stages // placement.num_ranks
    if placement.weight_copies > 1:
        stages = schedule.stages_per_rank
    if schedule.virtual_stages and stages == 1:
        return None  # Of one stage per rank, orders made for several are others' orders.
    if schedule.splits_backward != splits or schedule.weight_copies != placement.weight_copies:
        return None
    try:
        shape = schedule.resolve(
            pp=placement.num_ranks,
            num_microbatches=program.num_microbatches,
            stages_per_rank=stages,
            group=None,
        )
        if schedule.place(shape) != placement:
            return None
        return tuple(tuple(row) for row in schedule.order(shape))
    except PlanError:
        return None
