"""What all readers of other frameworks' files share: what comes out, and how a place is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.errors import PlanError, ProgramError
from strategies.plan import ScheduleFile
from strategies.referee.semantics import Semantics


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody knows beside the file.

    Attributes:
        num_gpus: Of the whole job, where the file leaves it to the launcher.
        layers: Decoder layers of the model, where the file only names it.
        placement: Which rank each stage of a CSV must stand on; None for the rows' own.
    """

    num_gpus: int | None = None
    layers: int | None = None
    placement: str | None = None


@dataclass(frozen=True, slots=True)
class Theirs:
    """Another framework's order in torch's notation.

    Attributes:
        file: The order as CSV, with messages where the framework says where they go.
        framework: Whose words they were.
        semantics: What its transport promises.
        grouped: Whether its messages go in groups.
        notes: What was taken for granted, for people.
        layers: Decoder layers of each stage, where the words say them.
    """

    file: ScheduleFile
    framework: str
    semantics: Semantics = "one_queue"
    grouped: bool = False
    notes: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None


def place(text: str, offset: int) -> str:
    r"""``line 3, column 7`` of a character, both from 1.

    >>> place("ab\ncd", 4)
    'line 2, column 2'
    """
    before = text[:offset]
    return f"line {before.count(chr(10)) + 1}, column {offset - before.rfind(chr(10))}"


def as_csv(rows: Sequence[Sequence[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)


def shown(text: str) -> str:
    """A piece of a file, short and harmless, for a message."""
    return ascii(text if len(text) <= 40 else text[:37] + "...")


def whole_number(value: object, name: str, where: str, *, least: int = 1) -> int:
    """A number that a file gives for ``name``.

    Raises:
        PlanError: It is none, or less than ``least``, or beyond any pipeline.
    """
    if isinstance(value, str) and value.strip().isdecimal() and len(value.strip()) < 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{where}: {name} is {shown(str(value))}, and must be a whole number.")
    if not least <= value <= _MOST:
        raise PlanError(f"{where}: {name}={value}: at least {least} and at most {_MOST}.")
    return value


_MOST = 1_000_000
# An order of more instructions is not written out.
_MOST_CELLS = 2_000_000


def check_size(cells: int, where: str) -> None:
    """Refuses an order that would fill the memory before anything can be said of it.

    Raises:
        ProgramError: It has more instructions than are looked at.
    """
    if cells > _MOST_CELLS:
        raise ProgramError(
            f"{where}: this asks for {cells:,} computations, and at most {_MOST_CELLS:,} are "
            "looked at. Try fewer microbatches: what repeats needs no proof of its own."
        )
