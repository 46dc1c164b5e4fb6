"""From the figures of calls to those of units: sums, and what neighbours keep together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from strategies.runtime.tracing.figures import Figures


@dataclass(slots=True)
class UnitFigures:
    """What one unit takes at one number of rows, all its calls and operations together.

    Attributes:
        name: Its module's name.
        forward_flops: As ``Figures``.
        input_flops: The same.
        weight_flops: The same.
        kept: Bytes by the storage that is kept: a value's key, or one of the call's own.
        parameters: Names of the parameters that it uses.
        unknown: Operations without a formula.
    """

    name: str
    forward_flops: float = 0.0
    input_flops: float = 0.0
    weight_flops: float = 0.0
    kept: dict[Hashable, int] = field(default_factory=dict)
    parameters: dict[str, None] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    def add(
        self,
        figures: Figures,
        *,
        call: Hashable,
        inputs: Sequence[Hashable],
        outputs: Sequence[Hashable],
    ) -> None:
        """Adds a call.

        Args:
            figures: Its own.
            call: Tells it from all others.
            inputs: Keys of the values that it was given, each once, in order.
            outputs: Keys of the tensors that it returned.
        """
        self.forward_flops += figures.forward_flops
        self.input_flops += figures.input_flops
        self.weight_flops += figures.weight_flops
        self.unknown.update(figures.unknown)
        for number, entry in enumerate(figures.kept):
            key: Hashable = ("own", call, number)
            if entry.origin == "input":
                key = inputs[entry.index]
            elif entry.origin == "output" and entry.index < len(outputs):
                key = outputs[entry.index]
            self.kept[key] = max(entry.num_bytes, self.kept.get(key, 0))


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """A model at one number of rows.

    Attributes:
        units: In order.
        tensors: (producer, consumers, bytes) of what goes from unit to unit.
    """

    units: tuple[UnitFigures, ...]
    tensors: tuple[tuple[int, tuple[int, ...], int], ...]


def saved_bytes(units: Sequence[UnitFigures], number: int) -> int:
    """What a unit keeps beyond what the one before it keeps anyway."""
    before = units[number - 1].kept if number else {}
    return sum(size for key, size in units[number].kept.items() if key not in before)
