"""The SEND and RECV cells of a ``compute_comms`` CSV: complete and consistent, or refused.

They are checked and then dropped: our own lowering places every message by a rule that cannot
deadlock (``strategies.lowering.send_recv``), so where a file has them matters for whether the file
is sound, not for what runs. A file without any is a ``compute_only`` one and needs none. UNSHARD,
RESHARD and REDUCE_GRAD speak of sharded weights and of reductions, which passes of ours place; only
their stage's owner is checked.
"""

from __future__ import annotations

from strategies.errors import ProgramError
from strategies.ir.instruction import Kind
from strategies.ir.placement import Placement
from strategies.schedules.csv_file import Cell, CellRows
from strategies.schedules.csv_rules import Index

# (SEND or RECV, payload, stage, microbatch)
_Key = tuple[Kind, Kind, int, int]


def check_messages(rows: CellRows, index: Index, placement: Placement, *, name: str) -> None:
    """Refuses messages that are missing, repeated, of no use, or at the wrong place.

    Args:
        rows: As ``parse_cells`` gives them.
        index: As ``check_cells`` gives it.
        placement: Stages to ranks, as all cells of ``index`` have it.
        name: What messages call the file.

    Raises:
        ProgramError: The first rule that is broken, at its line and column.
    """
    needed = _needed(index, placement)
    found: dict[_Key, Cell] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            where = f"{name}, {cell.place}: {cell.text}"
            item = cell.instruction
            if item is None:
                _check_owner(cell, rank, placement, where)
                continue
            if item.payload is None or item.microbatch is None:
                continue
            key = (item.kind, item.payload, item.stage, item.microbatch)
            if key not in needed:
                raise ProgramError(
                    f"{where}: no value of that microbatch goes from one rank to another there. "
                    "Remove it."
                )
            if key in found:
                raise ProgramError(
                    f"{where} stands a second time, first in {found[key].place}. Every message has "
                    "one SEND and one RECV."
                )
            found[key] = cell
            _check_order(cell, needed[key], rank, where)
    if not found:
        return
    missing = [
        (compute.line, compute.column, key)
        for key, (compute, _) in needed.items()
        if key not in found
    ]
    if missing:
        key = min(missing, key=lambda entry: entry[:2])[2]
        compute = needed[key][0]
        kind, payload, stage, microbatch = key
        word = f"{stage}{kind.value}_{payload.value}{microbatch}"
        side = "after" if kind is Kind.SEND else "before"
        raise ProgramError(
            f"{name}, {compute.place}: {compute.text} has no {word}, but its "
            f"{'result goes to' if kind is Kind.SEND else 'input comes from'} another rank. "
            f"Write {word} {side} it, or leave out all SENDs and RECVs."
        )


def _needed(index: Index, placement: Placement) -> dict[_Key, tuple[Cell, int]]:
    """Messages between ranks, each with the computation it must follow (SEND) or precede."""
    needed: dict[_Key, tuple[Cell, int]] = {}
    for kind, stage, microbatch in list(index):
        if kind is Kind.W:
            continue
        payload = Kind.F if kind is Kind.F else Kind.B
        source = stage - 1 if payload is Kind.F else stage + 1
        if not 0 <= source < placement.num_stages:
            continue
        if placement.rank_of(source, microbatch) == placement.rank_of(stage, microbatch):
            continue
        maker = next(
            index[made, source, microbatch]
            for made in ((Kind.F,) if payload is Kind.F else (Kind.B, Kind.I))
            if (made, source, microbatch) in index
        )
        needed[Kind.SEND, payload, source, microbatch] = maker
        needed[Kind.RECV, payload, stage, microbatch] = index[kind, stage, microbatch]
    return needed


def _check_order(cell: Cell, compute: tuple[Cell, int], rank: int, where: str) -> None:
    other, its_rank = compute
    if rank != its_rank:
        raise ProgramError(
            f"{where} stands on rank {rank}, but {other.text} on rank {its_rank} ({other.place}). "
            f"Move it to line {its_rank + 1}."
        )
    assert cell.instruction is not None
    if cell.instruction.kind is Kind.SEND and cell.column < other.column:
        raise ProgramError(
            f"{where} stands before {other.text} (column {other.column}), whose result it sends."
        )
    if cell.instruction.kind is Kind.RECV and cell.column > other.column:
        raise ProgramError(
            f"{where} stands after {other.text} (column {other.column}), whose input it receives."
        )


def _check_owner(cell: Cell, rank: int, placement: Placement, where: str) -> None:
    owners = placement.owners(cell.stage) if cell.stage < placement.num_stages else ()
    if rank not in owners:
        place = f"on rank {' and '.join(map(str, owners))}" if owners else "nowhere"
        raise ProgramError(f"{where} stands on rank {rank}, but stage {cell.stage} is {place}.")
