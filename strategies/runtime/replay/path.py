"""The path of a step: what a probe has seen, as frozen data.

Positions in a step are pairs ``(call, event)``: so many unit calls have returned, and so many
tracked operations have run since the last one. A value's key adds its place in the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.runtime.replay.hole import Spec

Position = tuple[int, int]
Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Event:
    """A tracked operation between unit calls.

    Attributes:
        name: Name of the torch function.
        line: ``file:line`` of the user's code.
        tracked: For every tensor of the result, whether it depends on parameters.
        random: Whether it draws random numbers.
        parameters: Global names of the parameters it uses directly.
    """

    name: str
    line: str
    tracked: tuple[bool, ...]
    random: bool
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a unit.

    Attributes:
        unit: Index of the unit module.
        line: ``file:line`` of the user's code.
        cost: Cost of the forward, > 0.
        tracked: For every tensor of the result and then of the effects, whether it is new.
        effects: Module and attribute names of the attributes that the call sets.
        parameters: Global names of the parameters it uses.
    """

    unit: int
    line: str
    cost: float
    tracked: tuple[bool, ...]
    effects: tuple[tuple[str, str], ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that crosses a cut.

    Attributes:
        key: Where the step makes it.
        spec: Its description in the probe.
        order: Permutation of its dimensions that makes it contiguous; None where it is already
            or where none does.
        written: Whether the step changes it in place after the cut.
        uses: Moments at which the step uses it, on the clock of the probe.
        changed: Whether the step ever changes it, or what shares its memory, in place.
    """

    key: Key
    spec: Spec
    order: tuple[int, ...] | None
    written: bool
    uses: tuple[int, ...] = ()
    changed: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """A place where the step can be left and taken up again: right after ``position``.

    Attributes:
        position: Of the operation or call before it.
        tensors: What crosses it.
        clock: When that was, on the clock of the probe.
    """

    position: Position
    tensors: tuple[Boundary, ...]
    clock: int = 0


@dataclass(frozen=True, slots=True)
class Path:
    """What the probe has seen of one step.

    Attributes:
        units: Names of the unit modules, whether called or not.
        calls: The calls in order.
        events: Tracked operations before call i, for i in ``range(len(calls) + 1)``.
        cuts: For every i in ``range(len(calls) + 1)`` the cut before call i, or the reason why
            there is none.
        clones_batch: Whether the step writes into its batch.
    """

    units: tuple[str, ...]
    calls: tuple[Call, ...]
    events: tuple[tuple[Event, ...], ...]
    cuts: tuple[Cut | str, ...]
    clones_batch: bool

    def name(self, call: int) -> str:
        """Name of the unit of a call; ``#2`` marks the second call of the same module, etc."""
        unit = self.calls[call].unit
        count = sum(1 for other in self.calls[: call + 1] if other.unit == unit)
        return self.units[unit] if count == 1 else f"{self.units[unit]}#{count}"
