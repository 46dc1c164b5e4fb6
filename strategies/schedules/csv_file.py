"""The text of a schedule's CSV as rows of cells; every complaint names line and column.

The notation is that of torch.distributed.pipelining: a line is a rank, a cell an instruction, an
empty cell a bubble. ``0F1`` is stage 0, forward, microbatch 1; B is the whole backward, I and W its
halves; ``(0F1;3B0)OVERLAP_F_B`` is a fused pair. Of the two formats that torch writes,
``compute_only`` has these alone; ``compute_comms`` also has ``0SEND_F1 1RECV_F1 1SEND_B1 0RECV_B1``
(always between neighbouring stages) and ``0UNSHARD 0RESHARD 0REDUCE_GRAD``, which speak of sharded
weights and of reductions: passes of ours place those.

torch reads a cell up to where it makes sense (``0Fgarbage`` is a forward there); here a cell is an
instruction from its first to its last letter. What spreadsheets add is forgiven: a byte order mark,
CRLF, spaces, quotes around a cell, empty cells at the end of a line, empty lines at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, overlap
from strategies.ir.kinds import ESSENTIAL_KINDS, MESSAGE_KINDS, Kind
from strategies.ir.text import parse_instruction

_SHARDS = re.compile(r"([0-9]{1,7})(?:UNSHARD|RESHARD|REDUCE_GRAD)")
_SPELLING = "Write stage, letter, microbatch, as in 2F0 2B0 2I0 2W0, and nothing for a bubble."


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell that is not empty.

    Attributes:
        line: From 1, as editors count.
        column: From 1; bubbles count.
        text: Its content, without quotes and spaces around it.
        instruction: What is computed or moved; None for UNSHARD, RESHARD and REDUCE_GRAD.
    """

    line: int
    column: int
    text: str
    instruction: Instruction | None

    @property
    def place(self) -> str:
        return f"line {self.line}, column {self.column}"

    @property
    def compute(self) -> tuple[Instruction, ...]:
        """The F, B, I and W in it: none in a message, two in a fused pair."""
        if self.instruction is None or self.instruction.kind in MESSAGE_KINDS:
            return ()
        return self.instruction.parts

    @property
    def stage(self) -> int:
        """The stage it names; of a fused pair, that of the forward."""
        if self.instruction is not None:
            return self.instruction.stage
        found = _SHARDS.fullmatch(self.text)
        assert found is not None
        return int(found[1])


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
    if _SHARDS.fullmatch(text):
        return Cell(line, column, text, None)
    item = _instruction(text)
    if item is None or item.kind not in ESSENTIAL_KINDS | MESSAGE_KINDS or {*text} & {*"@<>"}:
        shown = ascii(text if len(text) <= 40 else text[:37] + "...")
        raise ProgramError(
            f"{name}, line {line}, column {column}: {shown} is not an instruction. {_hint(text)}"
        )
    if item.halves and item.halves[0].kind is not Kind.F:
        item = overlap(*item.halves[::-1])
    return Cell(line, column, text, item)


def _instruction(text: str) -> Instruction | None:
    try:
        return parse_instruction(text)
    except ProgramError:
        return None


def _hint(text: str) -> str:
    meant = _instruction(text.upper())
    if meant is not None and meant.kind is Kind.R:
        return "Recomputation is no part of a file: leave it out and add recompute=full."
    if meant is not None and meant.kind in ESSENTIAL_KINDS and text != text.upper():
        return f"Did you mean {text.upper()}?"
    if re.fullmatch(r"0+(SEND_B|RECV_F)[0-9]+", text):
        return "There is no stage before stage 0."
    if text.endswith("OVERLAP_F_B"):
        return "Write a fused pair as (0F1;3B0)OVERLAP_F_B."
    if ";" in text or "\t" in text:
        return "Cells are separated by commas."
    return _SPELLING
