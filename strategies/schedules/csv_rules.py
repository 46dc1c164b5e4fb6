"""What the cells of a schedule's CSV must add up to, each rule broken at a line and column.

Every stage runs every microbatch forwards and backwards exactly once. Whether the order can work is
not decided here: that is the verifier's, as for every other program.
"""

from __future__ import annotations

from collections.abc import Iterator

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, Kind
from strategies.schedules.csv_file import Cell, CellRows

# (kind, stage, microbatch) -> the cell that runs it, and its rank.
Index = dict[tuple[Kind, int, int], tuple[Cell, int]]


def check_cells(rows: CellRows, *, name: str) -> Index:
    """Finds every computation, and refuses what is missing, repeated or contradictory.

    Args:
        rows: As ``parse_cells`` gives them.
        name: What messages call the file.

    Returns:
        Where each computation stands. Stages and microbatches count from 0 without a gap.

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
    for stage in range(stages):
        for microbatch in range(microbatches):
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
            f"{whole[0].place}. Write {wanted}."
        )
    if half and not (inputs and weights):
        other = f"{stage}{'I' if weights else 'W'}{microbatch}"
        raise ProgramError(
            f"{name}, {half[0].place}: {half[0].text} without {other}. Write {wanted}."
        )
    if forward and not gradient:
        raise ProgramError(
            f"{name}, {forward[0].place}: {stage}F{microbatch} has no backward. Write {wanted}, "
            "after it."
        )
    if gradient and not forward:
        raise ProgramError(
            f"{name}, {gradient[0].place}: {gradient[0].text} has no forward. Write "
            f"{stage}F{microbatch}, before it."
        )
    if not forward:
        cell = _first(cell for key, (cell, _) in index.items() if key[2] == microbatch)
        raise ProgramError(
            f"{name}, {cell.place}: {cell.text} is of microbatch {microbatch}, which no line runs "
            f"through stage {stage}. Write {stage}F{microbatch}, and {wanted}."
        )


def _first(cells: Iterator[Cell]) -> Cell:
    return min(cells, key=lambda cell: (cell.line, cell.column))


def _microbatch(item: Instruction) -> int:
    assert item.microbatch is not None
    return item.microbatch
