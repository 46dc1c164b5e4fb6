"""Own schedules: an order in a user's CSV file, a line per rank.

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

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

from strategies.errors import PlanError, ProgramError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MESSAGE_KINDS, Kind
from strategies.ir.program import PLACEMENTS, Placement, Program, bidirectional, chain, loop, v
from strategies.ir.verify import check_rules
from strategies.plan import ScheduleFile
from strategies.schedules.csv_file import Cell, CellRows, parse_cells
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
    program, compute = _read(rows, file, messages=False)
    with _at_cells(compute, file.name):
        _ = program.graph
    return program.placement, program.num_microbatches, program.ranks


def read_order(file: ScheduleFile, *, messages: bool) -> Program:
    """A file as a program; everything is checked but whether the order can run.

    ``messages``: whether SENDs and RECVs stay
    where the file has them (the program counts as lowered then, if there are any).

    Raises:
        PlanError: ``file.placement`` is not for so many ranks.
        ProgramError: The file is wrong; the message has line and column.
    """
    return _read(parse_cells(file.text, name=file.name), file, messages=messages)[0]


def _read(rows: CellRows, file: ScheduleFile, *, messages: bool) -> tuple[Program, CellRows]:
    """The program, and the cells that its instructions come from."""
    placement = _place(rows, file)
    kept = tuple(tuple(cell for cell in row if cell.instruction) for row in rows)
    program = Program(
        schedule=file.name,
        placement=placement,
        num_microbatches=1 + max(part.microbatch or 0 for _, _, part in _computed(rows)),
        ranks=_instructions(kept),
        boundaries=chain(placement.num_stages),
        role="accumulate",  # Passes of ours add the updates.
        lowered=any(not cell.compute for row in kept for cell in row),
    )
    with _at_cells(kept, file.name):
        check_rules(program)
        _check_messages(program)
    if not messages:
        kept = tuple(tuple(cell for cell in row if cell.compute) for row in kept)
        program = replace(program, ranks=_instructions(kept), lowered=False)
    return replace(program, role="train"), kept


_PEER = re.compile(r"((?:SEND|RECV)_[FB][0-9]+)[<>][0-9]+")


@contextmanager
def _at_cells(rows: CellRows, name: str) -> Iterator[None]:
    """Errors with the line and column of the instruction that they are about."""
    try:
        yield
    except ProgramError as error:
        assert error.place is not None
        rank, place = error.place
        reason = _PEER.sub(r"\1", error.reason.removeprefix(f"{name}: "))
        raise ProgramError(
            f"{name}, {rows[rank][place].place}: {reason}", fix=_PEER.sub(r"\1", error.fix)
        ) from None


def _check_messages(program: Program) -> None:
    """A SEND stands behind what it sends, a RECV before what uses it; the rest is lowering's."""
    graph = program.dependencies
    for node, item in enumerate(graph.nodes):
        for need in graph.late_needs(node):
            other = graph.nodes[need]
            if item.kind in MESSAGE_KINDS or other.kind in MESSAGE_KINDS:
                text = f"{item} stands before {other}, which it needs."
                raise ProgramError(text, place=graph.place(node))


def _instructions(rows: CellRows) -> Rows:
    return tuple(tuple(cell.instruction for cell in row if cell.instruction) for row in rows)


def _computed(rows: CellRows) -> Iterator[tuple[int, Cell, Instruction]]:
    """Rank, cell and instruction of every F, B, I and W."""
    for rank, row in enumerate(rows):
        for cell in row:
            for part in cell.compute:
                yield rank, cell, part


def _place(rows: CellRows, file: ScheduleFile) -> Placement:
    """The placement that the file says or asks for; forwards stand as it has them."""
    name = file.name
    forwards = {
        (part.stage, part.microbatch): (rank, cell)
        for rank, cell, part in _computed(rows)
        if part.kind is Kind.F and part.microbatch is not None
    }
    copies = _copies(rows, forwards, name)
    if file.placement is not None:
        placement = _named(file.placement, len(rows), len(copies[0]), name)
    else:
        placement = _like(copies, len(rows))
    for (stage, microbatch), (rank, cell) in forwards.items():
        right = placement.rank_of(stage, microbatch)
        if rank == right:
            continue
        if file.placement is not None:
            why = f"the {placement.name} placement has it on rank {right}"
            fix = "Try schedule.placement=null: the file's own."
        else:
            other = forwards[stage, microbatch % placement.weight_copies][1]
            why = f"rank {right} runs its stage ({other.text} in {other.place})"
            fix = (
                "Put a stage on one rank, or on two: even microbatches on the one, odd ones on "
                "the other."
            )
        raise ProgramError(
            f"{name}, {cell.place}: {cell.text} stands on rank {rank}, but {why}.", fix=fix
        )
    for rank, row in enumerate(rows):
        for cell in row:
            if cell.instruction is None and cell.stage not in placement.stages_of(rank):
                raise ProgramError(
                    f"{name}, {cell.place}: {cell.text} stands on rank {rank}, which does not run "
                    f"stage {cell.stage}.",
                    fix="Remove it.",
                )
    return placement


Forwards = dict[tuple[int, int], tuple[int, Cell]]


def _copies(rows: CellRows, forwards: Forwards, name: str) -> tuple[tuple[int, ...], ...]:
    """Where the forwards of microbatch 0, and of 1 for a second copy, run each stage."""
    num_stages = 1 + max(part.stage for _, _, part in _computed(rows))
    copies = []
    for microbatch in (0, 1) if (0, 1) in forwards else (0,):
        ranks = []
        for stage in range(num_stages):
            if (stage, microbatch) not in forwards:
                cell = _nearest(rows, stage, microbatch)
                raise ProgramError(
                    f"{name}, {cell.place}: {cell.text}, but no line runs {stage}F{microbatch}. "
                    "Stages and microbatches count from 0 without a gap.",
                    fix=f"Write {stage}F{microbatch}.",
                )
            ranks.append(forwards[stage, microbatch][0])
        copies.append(tuple(ranks))
    return tuple(copies[:1] if copies[0] == copies[-1] else copies)


def _nearest(rows: CellRows, stage: int, microbatch: int) -> Cell:
    """The first cell of that pair, else of that stage or a later one."""

    def distance(entry: tuple[int, Cell, Instruction]) -> tuple[bool, bool]:
        part = entry[2]
        return (part.stage, part.microbatch) != (stage, microbatch), part.stage < stage

    return min(_computed(rows), key=distance)[1]


def _like(copies: tuple[tuple[int, ...], ...], pp: int) -> Placement:
    """The placement with these copies; one of ours, if it is one."""
    whole = len(copies[0]) // pp
    known = [bidirectional(pp)]
    if len(copies[0]) == whole * pp:
        known = [loop(pp, whole), v(pp, whole), *known]
    found = (placement for placement in known if placement.copies == copies)
    return next(found, Placement(NAME, pp, copies))


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
