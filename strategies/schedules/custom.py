"""Own schedules: an order that somebody wrote into a CSV file, a line per rank.

    python -m launcher schedule=custom schedule.file=my.csv pp=2

The notation is that of torch.distributed.pipelining (``csv_file``), which ``schedule.csv`` in the
folder of every run has, too. The file says how many microbatches there are and which rank runs
which stage; any placement goes. A stage may stand on two ranks, which then hold a copy of its
weights each: even microbatches on the one, odd ones on the other, as in Chimera and DualPipe.

What is checked, at line and column: notation, completeness and messages if there are any
(``csv_file``), placement (here), and that the order can run. An order that cannot is shown as a
grid with the step that every rank is stuck at and what it waits for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from strategies.errors import DeadlockError, PlanError, ProgramError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import PLACEMENTS, Placement, Program, bidirectional, chain, loop, v
from strategies.ir.versions import check_versions
from strategies.plan import ScheduleFile
from strategies.schedules.csv_file import CellRows, Index, check_cells, check_messages, parse_cells
from strategies.schedules.schedule import Rows, Schedule, Shape

NAME = "custom"


@lru_cache(maxsize=64)
def custom_schedule(file: ScheduleFile, *, pp: int) -> Schedule:
    """A file as an entry of the registry: for the degrees that it was written for, and no others.

    Raises:
        PlanError: The file is not for ``pp`` ranks.
        ProgramError: The file is wrong; the message has line and column.
    """
    placement, num_microbatches, rows = from_file(file, pp=pp)

    def rule(shape: Shape) -> None:
        if shape.num_microbatches != num_microbatches:
            raise PlanError(
                f"num_microbatches={shape.num_microbatches}, but {file.name} has "
                f"{num_microbatches}. Try num_microbatches={num_microbatches}, or "
                "num_microbatches=auto."
            )

    return Schedule(
        NAME,
        lambda shape: rows,
        placement=lambda shape: placement,
        stages_per_rank=placement.stages_per_rank,
        weight_copies=placement.weight_copies,
        splits_backward=any(
            part.kind is Kind.W for row in rows for item in row for part in item.parts
        ),
        num_microbatches=num_microbatches,
        rule=rule,
    )


def from_file(file: ScheduleFile, *, pp: int) -> tuple[Placement, int, Rows]:
    """The placement, the number of microbatches and the order of a file; it can run.

    Raises:
        PlanError: The file is for another number of ranks.
        ProgramError: The file is wrong; the message has line and column.
    """
    rows = parse_cells(file.text, name=file.name)
    if len(rows) > pp:
        raise PlanError(
            f"{file.name}, line {pp + 1}, column 1: a line is a rank, and pp={pp} has none for "
            f"this one; the file has {len(rows)} lines. Try pp={len(rows)}."
        )
    if len(rows) < pp:
        raise PlanError(
            f"{file.name}, line {len(rows)}, column 1: this is the last line, for rank "
            f"{len(rows) - 1}, but pp={pp} needs {pp} lines. Try pp={len(rows)}."
        )
    program, compute = read_order(rows, file, messages=False)
    _check_order(program, compute)
    return program.placement, program.num_microbatches, program.ranks


def read_order(rows: CellRows, file: ScheduleFile, *, messages: bool) -> tuple[Program, CellRows]:
    """A file's rows as a program, and the cells that its instructions come from.

    Everything is checked but whether the order can run. ``messages``: whether SENDs and RECVs stay
    where the file has them (the program counts as lowered then, if there are any).

    Raises:
        PlanError: ``file.placement`` is not for so many ranks.
        ProgramError: The file is wrong; the message has line and column.
    """
    index = check_cells(rows, name=file.name)
    placement = _place(index, len(rows), file.name, file.placement)
    check_messages(rows, index, placement, name=file.name)
    kept = tuple(
        tuple(cell for cell in row if cell.instruction and (cell.compute or messages))
        for row in rows
    )
    program = Program(
        schedule=file.name,
        placement=placement,
        num_microbatches=1 + max(microbatch for _, _, microbatch in index),
        ranks=tuple(tuple(cell.instruction for cell in row if cell.instruction) for row in kept),
        boundaries=chain(placement.num_stages),
        lowered=any(not cell.compute for row in kept for cell in row),
    )
    return _of_one_version(program, kept), kept


def _of_one_version(program: Program, cells: CellRows) -> Program:
    """The program without the versions that it names.

    Raises:
        ProgramError: A backward reads another one than its forward, or one that nobody makes.
    """
    check_versions(program)
    for row in cells:
        for cell in row:
            for item in cell.compute:
                if item.version:
                    raise ProgramError(
                        f"{program.schedule}, {cell.place}: {cell.text} reads version "
                        f"{item.version} of the weights, which nobody makes: a file is one step, "
                        "and its update comes behind all of its gradients.",
                        fix=(
                            "Leave out what begins with #, or try schedule=pipedream_2bw or "
                            "schedule=pipedream, whose microbatches read several versions."
                        ),
                    )
    return program.with_ranks(
        tuple(tuple(_unversioned(item) for item in row) for row in program.ranks)
    )


def _unversioned(item: Instruction) -> Instruction:
    halves = tuple(replace(half, version=None) for half in item.halves)
    return replace(item, version=None, halves=halves)


def _place(index: Index, pp: int, name: str, wanted: str | None) -> Placement:
    num_stages = 1 + max(stage for _, stage, _ in index)
    if wanted is not None:
        placement = _named(wanted, pp, num_stages, name)
    else:
        placement = _inferred(index, pp, num_stages)
    for (_, stage, microbatch), (cell, rank) in index.items():
        right = placement.rank_of(stage, microbatch)
        if rank == right:
            continue
        if wanted is not None:
            why = (
                f"the {wanted} placement has it on rank {right}. Try schedule.placement=null: the "
                "file's own"
            )
        else:
            other = index[Kind.F, stage, microbatch % placement.weight_copies][0]
            why = (
                f"rank {right} runs its stage ({other.text} in {other.place}). A stage stands on "
                "one rank, or on two: even microbatches on the one, odd ones on the other"
            )
        raise ProgramError(f"{name}, {cell.place}: {cell.text} stands on rank {rank}, but {why}.")
    return placement


def _named(wanted: str, pp: int, num_stages: int, name: str) -> Placement:
    if wanted not in PLACEMENTS:
        raise PlanError(
            f"schedule.placement={wanted} is unknown. "
            f"Try schedule.placement={' or schedule.placement='.join(PLACEMENTS)}."
        )
    stages_per_rank, rest = divmod(num_stages, pp)
    both = wanted == "bidirectional"
    if rest or (both and (stages_per_rank != 1 or pp == 1)):
        rule = "a stage per rank, at least two" if both else "a multiple of pp stages"
        raise PlanError(
            f"schedule.placement={wanted} needs {rule}, but {name} has {num_stages} stages on "
            f"{pp} ranks. Try schedule.placement=null, which takes the placement from the file."
        )
    if both:
        return bidirectional(pp)
    return loop(pp, stages_per_rank) if wanted == "loop" else v(pp, stages_per_rank)


def _inferred(index: Index, pp: int, num_stages: int) -> Placement:
    """Where the forwards of microbatch 0, and of 1 for a second copy, run each stage."""
    odd_too = (Kind.F, 0, 1) in index
    copies = tuple(
        tuple(index[Kind.F, stage, microbatch][1] for stage in range(num_stages))
        for microbatch in range(2 if odd_too else 1)
    )
    if copies[0] == copies[-1]:
        copies = copies[:1]
    whole = num_stages // pp
    known = [bidirectional(pp)]
    if num_stages == whole * pp:
        known = [loop(pp, whole), v(pp, whole), *known]
    found = (placement for placement in known if placement.copies == copies)
    return next(found, Placement(NAME, pp, copies))


def _check_order(program: Program, rows: CellRows) -> None:
    """Refuses an order that deadlocks, at the cells that never begin."""
    try:
        _ = program.graph
    except DeadlockError as error:
        heads = zip(rows, error.stuck, strict=True)
        stuck = [row[place] for row, place in heads if place < len(row)]
        more = [f"{cell.text} in {cell.place}" for cell in stuck[1:4]]
        more += ["..."] if len(stuck) > 4 else []
        also = f" Stuck, too: {', '.join(more)}." if more else ""
        raise ProgramError(
            f"{program.schedule}, {stuck[0].place}: {stuck[0].text} never begins, the order cannot "
            f"run.{also}\n{error}"
        ) from None
