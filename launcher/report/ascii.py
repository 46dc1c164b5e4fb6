"""A timeline as text: a row per rank, a cell per time slot.

    rank 0 | 0F0 0F1  .   .  0B0  -  0B1  -
    rank 1 |  .  1F0 1F1 1B0  -  1B1  -

Where the durations are commensurable (uniform costs) a slot is their greatest common divisor and
the picture is exact. Otherwise times are rounded to the shortest instruction; where even that is
too wide, a column is one character and shows what took most of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor

from launcher.report.rows import Row, timeline_rows, uses_channel, zeroed
from launcher.report.summary import format_duration
from strategies.analysis.timeline import Event, Timeline
from strategies.ir.kinds import (
    CHANNEL_KINDS,
    COMPUTE_KINDS,
    EXCHANGE_KINDS,
    KINDS,
    MICROBATCH_KINDS,
    Kind,
    spellings,
)

_IDLE, _RUNNING = ".", "-"
# An exact slot may be this much shorter than the shortest instruction, not more: a latency of 0.01
# would make every forward a hundred cells wide.
_MAX_SHARE = 4
_MAX_LINES = 48  # a wrapped picture with more lines than that is no overview any more
_MAX_BLOCKS = 3
_MAX_SLOTS = 4000  # on one endless line, width=None
_STRIP_COLUMNS = 200


@dataclass(frozen=True, slots=True)
class _Line:
    label: str
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class _Grid:
    """How time becomes columns.

    Attributes:
        slot: Duration of a cell, in the timeline's unit.
        num_slots: Cells of the longest row.
        per_line: Cells per line; fewer than ``num_slots`` where the picture is wrapped.
        cell: Characters per cell, without the space between; 1 for a strip.
        exact: Every start and end lies on the border of a slot.
    """

    slot: float
    num_slots: int
    per_line: int
    cell: int
    exact: bool

    @property
    def strip(self) -> bool:
        return self.cell == 1


def draw(timeline: Timeline, *, width: int | None = None) -> str:
    """Draws one line per rank, and one per collective channel where reductions take time.

    Args:
        timeline: Simulated or measured.
        width: Characters per line. A wider picture is continued below, or, where that would be
            too long, compressed to one character per column. None for one line of any length.

    Returns:
        Lines without a newline at the end; a legend follows where times had to be rounded.
    """
    timeline = zeroed(timeline)
    rows = timeline_rows(timeline)
    lines = _lines(rows)
    grid = _grid(timeline, lines, width)
    drawn = _draw_strip(lines, grid) if grid.strip else _draw_cells(lines, grid)
    if not grid.exact:
        drawn += ["", _legend(timeline, rows, grid)]
    return "\n".join(drawn)


def legend(timeline: Timeline, *, width: int | None = None) -> str:
    """What a cell of ``draw`` with the same arguments means, in one line."""
    timeline = zeroed(timeline)
    rows = timeline_rows(timeline)
    return _legend(timeline, rows, _grid(timeline, _lines(rows), width))


def _legend(timeline: Timeline, rows: Sequence[Row], grid: _Grid) -> str:
    slot = format_duration(grid.slot, timeline.time_unit)
    channel = uses_channel(rows)
    if grid.strip:
        letters = spellings(kind for kind in MICROBATCH_KINDS if not KINDS[kind].key)
        kinds = ", ".join([" ".join(letters), *_keys(COMPUTE_KINDS, fused=_fuses(timeline))])
        text = f"a column is {slot}: the kind that took most of it ({kinds}), "
        text += f"capital where an instruction begins, {_IDLE}: idle"
        sent = CHANNEL_KINDS | EXCHANGE_KINDS if _exchanges(timeline) else CHANNEL_KINDS
        return text + (f"; comm: {', '.join(_keys(sent))}" if channel else "")
    text = f"a slot is {slot}{'' if grid.exact else ', times rounded'}; 2F0: stage 2, forward, "
    text += f"microbatch 0; {_RUNNING}: still running; {_IDLE}: idle"
    text += "; 2F1& 3B0: run as one" if _fuses(timeline) else ""
    if timeline.program.updates is not None:
        text += "; #1: with version 1 of the weights"
    text += "; comm: 2.0 reduces stage 2, bucket 0" if channel else ""
    tokens = ", 2D1 and 2C1: tokens of microbatch 1 to experts and back"
    return text + (tokens if channel and _exchanges(timeline) else "")


def _keys(kinds: frozenset[Kind], *, fused: bool = False) -> Iterator[str]:
    shown = kinds if fused else kinds - {Kind.OVERLAP}
    return (facts.key for kind, facts in KINDS.items() if kind in shown and facts.key)


def _exchanges(timeline: Timeline) -> bool:
    return any(timeline.program.exchanges)


def _fuses(timeline: Timeline) -> bool:
    return any(item.halves for row in timeline.program.ranks for item in row)


def _lines(rows: Sequence[Row]) -> tuple[_Line, ...]:
    digits = len(str(len(rows) - 1))
    channel = uses_channel(rows)
    lines = []
    for rank, row in enumerate(rows):
        named = [("rank", row.compute), *([("comm", row.channel)] if channel else [])]
        for name, lanes in named:
            label = f"{name} {rank:>{digits}}"
            for index, lane in enumerate(lanes or ((),)):
                lines.append(_Line(label if index == 0 else " " * len(label), lane))
    return tuple(lines)


def _grid(timeline: Timeline, lines: Sequence[_Line], width: int | None) -> _Grid:
    span = timeline.makespan
    events = [event for line in lines for event in line.events]
    if not events:
        return _Grid(max(span, 1.0), 0, 1, 3, exact=True)
    cell = max(3, max(len(label) for event in events for label in _cell_labels(event)))
    counted = [e for e in events if e.instruction.kind in MICROBATCH_KINDS] or events
    shortest = min(event.end - event.start for event in counted)
    divisor = _common_divisor(events, shortest)
    slot = divisor or shortest
    num_slots = _column(span, slot)
    room = None if width is None else width - len(lines[0].label) - len(" | ")
    if room is None:
        if num_slots <= _MAX_SLOTS:
            return _Grid(slot, num_slots, num_slots, cell, divisor is not None)
        columns = _STRIP_COLUMNS
    else:
        per_line = max(1, (room + 1) // (cell + 1))
        blocks = ceil(num_slots / per_line)
        if blocks == 1 or (blocks <= _MAX_BLOCKS and blocks * len(lines) <= _MAX_LINES):
            return _Grid(slot, num_slots, ceil(num_slots / blocks), cell, divisor is not None)
        columns = max(10, room)
    return _Grid(span / columns, columns, columns, 1, exact=False)


def _common_divisor(events: Sequence[Event], shortest: float) -> float | None:
    """Greatest common divisor of all times, None if it is far below the shortest instruction."""
    tolerance = 1e-6 * shortest
    divisor = shortest
    times = {time for event in events for time in (event.start, event.end)}
    for time in times:
        larger, smaller = time, divisor
        while smaller > tolerance:
            rest = larger % smaller
            larger, smaller = smaller, min(rest, smaller - rest)
        divisor = larger
        if divisor * _MAX_SHARE < shortest - tolerance:
            return None
    # Euclid's algorithm gathers rounding errors; a divisor counts the shortest a whole time.
    return shortest / round(shortest / divisor)


def _column(time: float, slot: float) -> int:
    """Rounded half up: two times at least a slot apart never meet in one column."""
    return floor(time / slot + 0.5)


def _cell_labels(event: Event) -> tuple[str, ...]:
    """What stands in an event's slots, one after the other; two for a fused pair."""
    item = event.instruction
    if item.kind in EXCHANGE_KINDS:
        return (f"{item.stage}{item.kind.value[0]}{item.microbatch}",)
    if item.bucket is not None:
        return (f"{item.stage}.{item.bucket}",)
    if item.microbatch is None:
        return (f"{item.stage}{item.kind.value[0]}",)
    names = tuple(
        f"{part.stage}{part.kind.value}{part.microbatch}"
        + ("" if part.version is None else f"#{part.version}")
        for part in item.parts
    )
    return names if len(names) == 1 else (f"{names[0]}&", names[1])


def _draw_cells(lines: Sequence[_Line], grid: _Grid) -> list[str]:
    drawn = []
    for line in lines:
        cells = [_IDLE] * grid.num_slots
        for event in line.events:
            first = _column(event.start, grid.slot)
            last = _column(event.end, grid.slot)
            labels = _cell_labels(event)
            for column in range(first, min(last, grid.num_slots)):
                turn = column - first
                cells[column] = labels[turn] if turn < len(labels) else _RUNNING
        drawn.append([_center(cell, grid.cell) for cell in cells])
    found: list[str] = []
    for begin in range(0, max(grid.num_slots, 1), grid.per_line):
        if begin:
            found.append("")
        for line, cells in zip(lines, drawn, strict=True):
            part = " ".join(cells[begin : begin + grid.per_line])
            found.append(f"{line.label} | {part}".rstrip())
    return found


def _center(text: str, width: int) -> str:
    """Like str.center, which puts the odd space left or right depending on the width."""
    left = (width - len(text)) // 2
    return " " * left + text + " " * (width - len(text) - left)


def _draw_strip(lines: Sequence[_Line], grid: _Grid) -> list[str]:
    found = []
    for line in lines:
        shares: list[dict[str, float]] = [{} for _ in range(grid.num_slots)]
        begins: list[set[str]] = [set() for _ in range(grid.num_slots)]
        for event in line.events:
            letter = event.instruction.kind.value[0]
            for column, share in _shares(event, grid):
                shares[column][letter] = shares[column].get(letter, 0.0) + share
            first = int(event.start / grid.slot)
            begins[min(first, grid.num_slots - 1)].add(letter)
        text = ""
        for share_of, begin in zip(shares, begins, strict=True):
            most = max(share_of, key=lambda letter: share_of[letter], default=_IDLE)
            if share_of and share_of[most] < 1.0 - sum(share_of.values()):
                most = _IDLE
            text += most if most in begin else most.lower()
        found.append(f"{line.label} | {text}")
    return found


def _shares(event: Event, grid: _Grid) -> Iterator[tuple[int, float]]:
    """(column, share of it) for every column that an event touches."""
    start, end = event.start / grid.slot, event.end / grid.slot
    for column in range(int(start), min(ceil(end), grid.num_slots)):
        yield column, min(end, column + 1) - max(start, column)
