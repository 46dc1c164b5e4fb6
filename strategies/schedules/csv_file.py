"""The text of a schedule's CSV as rows of cells; every complaint names line and column.

The notation is that of torch.distributed.pipelining: a line is a rank, a cell an instruction, an
empty cell a bubble. ``0F1`` is stage 0, forward, microbatch 1; B is the whole backward, I and W its
halves; ``(0F1;3B0)OVERLAP_F_B`` is a fused pair. Of the two formats that torch writes,
``compute_only`` has these alone; ``compute_comms`` also has ``0SEND_F1 1RECV_F1 1SEND_B1 0RECV_B1``
(always between neighbouring stages) and ``0UNSHARD 0RESHARD 0REDUCE_GRAD``.

``0F1#0`` also says which version of the weights it reads, as the lists of schedules without a flush
do. A file is one step, whose only update comes last, so there is version 0 alone.

torch reads a cell up to where it makes sense (``0Fgarbage`` is a forward there); here a cell is an
instruction from its first to its last letter. What spreadsheets add is forgiven: a byte order mark,
CRLF, spaces, quotes around a cell, empty cells at the end of a line, empty lines at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, overlap
from strategies.ir.kinds import Kind
from strategies.ir.program import Placement

_COMPUTE = re.compile(r"([0-9]{1,7})([FBIW])([0-9]{1,7})(?:#([0-9]{1,7}))?")
_AGAIN = re.compile(r"[0-9]{1,7}R[0-9]{1,7}")
_MESSAGE = re.compile(r"([0-9]{1,7})(SEND|RECV)_([FB])([0-9]{1,7})")
_SHARDS = re.compile(r"([0-9]{1,7})(UNSHARD|RESHARD|REDUCE_GRAD)")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_SPELLING = "Write stage, letter, microbatch, as in 2F0 2B0 2I0 2W0, and nothing for a bubble."


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell that is not empty.

    Attributes:
        line: From 1, as editors count.
        column: From 1; bubbles count.
        text: Its content, without quotes and spaces around it.
        stage: The stage it names; of a fused pair, that of the forward.
        instruction: What is computed or moved; None for UNSHARD, RESHARD and REDUCE_GRAD.
    """

    line: int
    column: int
    text: str
    stage: int
    instruction: Instruction | None

    @property
    def place(self) -> str:
        return f"line {self.line}, column {self.column}"

    @property
    def compute(self) -> tuple[Instruction, ...]:
        """The F, B, I and W in it: none in a message, two in a fused pair."""
        if self.instruction is None or self.instruction.kind in (Kind.SEND, Kind.RECV):
            return ()
        return self.instruction.parts


CellRows = tuple[tuple[Cell, ...], ...]


def parse_cells(text: str, *, name: str) -> CellRows:
    r"""The rows of a schedule's CSV, bubbles left out; every row computes something.

    Raises:
        ProgramError: A cell is no instruction, or a line has none.

    >>> rows = parse_cells("0F0,,,0B0,\r\n,1F0,1B0,,\r\n", name="my.csv")
    >>> [[cell.text for cell in row] for row in rows]
    [['0F0', '0B0'], ['1F0', '1B0']]
    """
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        cells = enumerate(line.split(","), start=1)
        found = [(column, _unquoted(cell)) for column, cell in cells]
        rows.append(tuple(_cell(cell, number, column, name) for column, cell in found if cell))
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ProgramError(f"{name} has no instruction. {_SPELLING}")
    for number, row in enumerate(rows, start=1):
        if not any(cell.compute for cell in row):
            raise ProgramError(
                f"{name}, line {number}, column 1: nothing is computed here. Every line is a rank "
                "with at least one stage;",
                fix="delete the line if it is none.",
            )
    return tuple(rows)


def _unquoted(cell: str) -> str:
    cell = cell.strip()
    while len(cell) > 1 and cell[0] == cell[-1] == '"':
        cell = cell[1:-1].strip()
    return cell


def _cell(text: str, line: int, column: int, name: str) -> Cell:
    where = f"{name}, line {line}, column {column}"
    if match := _SHARDS.fullmatch(text):
        return Cell(line, column, text, int(match[1]), None)
    if text.endswith("OVERLAP_F_B"):
        instruction = _pair(text, where)
    elif match := _MESSAGE.fullmatch(text):
        instruction = _message(match, where)
    else:
        instruction = _compute(text, where)
    return Cell(line, column, text, instruction.stage, instruction)


def _compute(text: str, where: str) -> Instruction:
    match = _COMPUTE.fullmatch(text)
    if match is None:
        shown = ascii(text if len(text) <= 40 else text[:37] + "...")
        hint = _SPELLING
        if _COMPUTE.fullmatch(text.upper()):
            hint = f"Did you mean {text.upper()}?"
        elif _AGAIN.fullmatch(text.upper()):
            hint = "Recomputation is no part of a file: leave it out and add recompute=full."
        elif ";" in text or "\t" in text:
            hint = "Cells are separated by commas."
        raise ProgramError(f"{where}: {shown} is not an instruction. {hint}")
    version = None if match[4] is None else int(match[4])
    return Instruction(Kind(match[2]), int(match[1]), int(match[3]), version=version)


def _pair(text: str, where: str) -> Instruction:
    match = _PAIR.fullmatch(text)
    if match is None:
        raise ProgramError(
            f"{where}: {text[:60]!a} is not a fused pair.", fix="Write (0F1;3B0)OVERLAP_F_B."
        )
    halves = sorted((_compute(half.strip(), where) for half in match.groups()), key=_forward_first)
    first, second = halves
    if first.kind is not Kind.F or second.kind not in (Kind.B, Kind.I):
        raise ProgramError(
            f"{where}: {text} must fuse one forward and one backward, as (0F1;3B0)OVERLAP_F_B does."
        )
    if first.microbatch == second.microbatch:
        raise ProgramError(
            f"{where}: {text} fuses a forward with a backward of its own microbatch, which cannot "
            "begin before it has ended.",
            fix=f"Write two cells: {first} and {second}.",
        )
    return overlap(first, second)


def _forward_first(item: Instruction) -> bool:
    return item.kind is not Kind.F


def _message(match: re.Match[str], where: str) -> Instruction:
    stage, kind, payload = int(match[1]), Kind(match[2]), Kind(match[3])
    # Activations come from the stage before and go to the next one, gradients the other way.
    down = (kind is Kind.SEND) is (payload is Kind.F)
    peer = stage + 1 if down else stage - 1
    if peer < 0:
        raise ProgramError(f"{where}: {match[0]}: there is no stage before stage 0.")
    return Instruction(kind, stage, int(match[4]), payload=payload, peer=peer)


# ------------------------------------------------------------------------------------ csv messages
# The SEND and RECV cells of a ``compute_comms`` CSV: complete and consistent, or refused.
#
# They are checked and then dropped: our own lowering places every message by a rule that cannot
# deadlock (``strategies.lowering.send_recv``), so where a file has them matters for whether the
# file is sound, not for what runs. A file without any is a ``compute_only`` one and needs none.
# UNSHARD, RESHARD and REDUCE_GRAD speak of sharded weights and of reductions, which passes of ours
# place; only their stage's owner is checked.

# (SEND or RECV, payload, stage, microbatch)
_Key = tuple[Kind, Kind, int, int]


def check_messages(rows: CellRows, index: Index, placement: Placement, *, name: str) -> None:
    """Refuses messages that are missing, repeated, of no use, or at the wrong place.

    Rows and index are as ``parse_cells`` and ``check_cells`` give them.

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
                    f"{where}: no value of that microbatch goes from one rank to another there.",
                    fix="Remove it.",
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
            f"{'result goes to' if kind is Kind.SEND else 'input comes from'} another rank.",
            fix=f"Write {word} {side} it, or leave out all SENDs and RECVs.",
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
            f"{where} stands on rank {rank}, but {other.text} on rank {its_rank} ({other.place}).",
            fix=f"Move it to line {its_rank + 1}.",
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


# --------------------------------------------------------------------------------------- csv rules
# What the cells must add up to: every stage runs every microbatch forwards and backwards exactly
# once. Whether the order can work is the verifier's, as for every other program.

# (kind, stage, microbatch) -> the cell that runs it, and its rank.
Index = dict[tuple[Kind, int, int], tuple[Cell, int]]


def check_cells(rows: CellRows, *, name: str) -> Index:
    """Where each computation stands; stages and microbatches count from 0 without a gap.

    Raises:
        ProgramError: The first rule that is broken.
    """
    index = _index(rows, name)
    _check_gap({(stage, cell) for (_, stage, _), (cell, _) in index.items()}, "stages", name)
    _check_gap({(m, cell) for (_, _, m), (cell, _) in index.items()}, "microbatches", name)
    _check_complete(index, name)
    return index


def _check_gap(used: set[tuple[int, Cell]], words: str, name: str) -> None:
    numbers = {number for number, _ in used}
    gap = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if gap < len(numbers):
        cell = _first(cell for number, cell in used if number > gap)
        raise ProgramError(
            f"{name}, {cell.place}: {cell.text}, but none of the {words} is {gap}. "
            f"{words.capitalize()} count from 0 without a gap."
        )


def _index(rows: CellRows, name: str) -> Index:
    index: Index = {}
    for rank, row in enumerate(rows):
        for cell in row:
            for item in cell.compute:
                key = (item.kind, item.stage, _microbatch(item))
                if key in index:
                    raise ProgramError(
                        f"{name}, {cell.place}: {item} stands a second time, first in "
                        f"{index[key][0].place}. Every instruction stands once."
                    )
                index[key] = (cell, rank)
    return index


def _check_complete(index: Index, name: str) -> None:
    stages = 1 + max(stage for _, stage, _ in index)
    microbatches = 1 + max(microbatch for _, _, microbatch in index)
    for stage, microbatch in product(range(stages), range(microbatches)):
        _check_pair(index, stage, microbatch, name)


def _check_pair(index: Index, stage: int, microbatch: int, name: str) -> None:
    forward, whole, inputs, weights = (
        index.get((kind, stage, microbatch)) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
    )
    wanted = f"{stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}"
    gradient = whole or inputs or weights
    half = inputs or weights
    if whole and half:
        raise ProgramError(
            f"{name}, {half[0].place}: {half[0].text} is a part of {stage}B{microbatch} in "
            f"{whole[0].place}.",
            fix=f"Write {wanted}.",
        )
    if half and not (inputs and weights):
        other = f"{stage}{'I' if weights else 'W'}{microbatch}"
        raise ProgramError(
            f"{name}, {half[0].place}: {half[0].text} without {other}.", fix=f"Write {wanted}."
        )
    if forward and not gradient:
        raise ProgramError(
            f"{name}, {forward[0].place}: {stage}F{microbatch} has no backward.",
            fix=f"Write {wanted}, after it.",
        )
    if gradient and not forward:
        raise ProgramError(
            f"{name}, {gradient[0].place}: {gradient[0].text} has no forward.",
            fix=f"Write {stage}F{microbatch}, before it.",
        )
    if not forward:
        cell = _first(cell for key, (cell, _) in index.items() if key[2] == microbatch)
        raise ProgramError(
            f"{name}, {cell.place}: {cell.text} is of microbatch {microbatch}, which no line runs "
            f"through stage {stage}.",
            fix=f"Write {stage}F{microbatch}, and {wanted}.",
        )


def _first(cells: Iterator[Cell]) -> Cell:
    return min(cells, key=lambda cell: (cell.line, cell.column))


def _microbatch(item: Instruction) -> int:
    assert item.microbatch is not None
    return item.microbatch
