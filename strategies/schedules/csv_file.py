"""The text of a schedule's CSV as rows of cells; every complaint names line and column.

The notation is that of torch.distributed.pipelining: a line is a rank, a cell an instruction, an
empty cell a bubble. ``0F1`` is stage 0, forward, microbatch 1; B is the whole backward, I and W its
halves; ``(0F1;3B0)OVERLAP_F_B`` is a fused pair. Of the two formats that torch writes,
``compute_only`` has these alone; ``compute_comms`` also has ``0SEND_F1 1RECV_F1 1SEND_B1 0RECV_B1``
(always between neighbouring stages) and ``0UNSHARD 0RESHARD 0REDUCE_GRAD``.

torch reads a cell up to where it makes sense (``0Fgarbage`` is a forward there); here a cell is an
instruction from its first to its last letter. What spreadsheets add is forgiven: a byte order mark,
CRLF, spaces, quotes around a cell, empty cells at the end of a line, empty lines at the end.

This module knows neither ranks' degrees nor what makes a program complete (``csv_rules``), and it
reads no files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, Kind, overlap

_COMPUTE = re.compile(r"([0-9]{1,7})([FBIW])([0-9]{1,7})")
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
        """``line 2, column 7``."""
        return f"line {self.line}, column {self.column}"

    @property
    def compute(self) -> tuple[Instruction, ...]:
        """The F, B, I and W in it: none in a message, two in a fused pair."""
        if self.instruction is None or self.instruction.kind in (Kind.SEND, Kind.RECV):
            return ()
        return self.instruction.parts


CellRows = tuple[tuple[Cell, ...], ...]


def parse_cells(text: str, *, name: str) -> CellRows:
    r"""Reads a schedule's CSV.

    Args:
        text: The content of the file.
        name: What messages call it.

    Returns:
        One row per line, bubbles left out; every row computes something.

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
                "with at least one stage; delete the line if it is none."
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
    return Instruction(Kind(match[2]), int(match[1]), int(match[3]))


def _pair(text: str, where: str) -> Instruction:
    match = _PAIR.fullmatch(text)
    if match is None:
        raise ProgramError(
            f"{where}: {text[:60]!a} is not a fused pair. Write (0F1;3B0)OVERLAP_F_B."
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
            f"begin before it has ended. Write two cells: {first} and {second}."
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
