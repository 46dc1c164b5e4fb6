"""The path of a step: what a probe has seen, as frozen data.

Positions in a step are pairs ``(call, event)``: so many unit calls have returned, and so many
tracked operations have run since the last one. A value's key adds its place in the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.replay.hole import Hole, Spec
from strategies.models.stage_model import filled

Position = tuple[int, int]
Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Event:
    """A tracked operation between unit calls: torch function ``name`` in the user's ``line``.

    Attributes:
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
    """One call of the unit module of index ``unit``, in the user's ``line``.

    Attributes:
        cost: Of the forward, > 0.
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
    """A tensor that crosses a cut; the step makes it at ``key``.

    Attributes:
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
    """A place where the step can be left right after ``position``, at ``clock`` of the probe."""

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
        left: Attributes that the step leaves with values from before its last layer, and which.
        drew: Whether the step itself has drawn random numbers, and whether by Python or numpy.
        kept: Values that the step keeps on its module, or returns in a dict.
        rewrites: Whether the step writes into tensors that it has given to a layer or operation.
    """

    units: tuple[str, ...]
    calls: tuple[Call, ...]
    events: tuple[tuple[Event, ...], ...]
    cuts: tuple[Cut | str, ...]
    clones_batch: bool
    left: tuple[tuple[str, tuple[int, int, int]], ...] = ()
    drew: tuple[bool, bool] = (False, False)
    kept: frozenset[tuple[int, int, int]] = frozenset()
    rewrites: bool = False

    def name(self, call: int) -> str:
        """Name of the unit of a call; ``#2`` marks the second call of the same module, etc."""
        unit = self.calls[call].unit
        count = sum(1 for other in self.calls[: call + 1] if other.unit == unit)
        return self.units[unit] if count == 1 else f"{self.units[unit]}#{count}"


class ParameterTable:
    """All parameters of the uncut module by global name; tied ones under their first name only.

    ``device`` is the one to name for parameters that are still on ``meta``.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        modules = dict(module.named_modules(remove_duplicate=False))
        first: dict[int, str] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._order = {id(m): tuple(m._parameters) for m in modules.values()}
        # What ``free`` has taken out, with the hole in its place.
        self._freed: dict[str, tuple[nn.Parameter, Hole]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            path, _, attribute = name.rpartition(".")
            canonical = first.setdefault(id(parameter), name)
            self._places.setdefault(canonical, []).append((modules[path], attribute))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def find(self, name: str) -> nn.Parameter | Hole:
        module, attribute = self._places[name][0]
        found: nn.Parameter | Hole = getattr(module, attribute)
        return found

    def by_identity(self) -> dict[int, str]:
        """Names by ``id`` of the present objects; a module may have replaced some since."""
        return {
            id(getattr(module, attribute)): name
            for name, places in self._places.items()
            for module, attribute in places
        }

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Lets ``parameters()`` list the holes as well: a step may go through all weights."""
        hidden: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in {id(m): m for places in self._places.values() for m, _ in places}.values():
            order = self._order[id(module)]
            table: dict[str, Any] = module._parameters
            if len(table) != len(order):
                hidden.append((table, dict(table)))
                full = {name: getattr(module, name) for name in order if hasattr(module, name)}
                table.clear()
                table.update(full)
        try:
            yield
        finally:
            for table, before in hidden:
                table.clear()
                table.update(before)

    def free(self, names: Iterable[str]) -> None:
        """Replaces parameters by holes: their memory goes, ``parameters()`` skips them."""
        for name in names:
            parameter = self.find(name)
            if isinstance(parameter, Hole):
                continue
            if name in self._freed:
                hole = self._freed[name][1]
            else:
                device = self._device if parameter.is_meta else None
                hole = Hole(Spec.of_parameter(parameter, device))
                hole.parameter = name
            for module, attribute in self._places[name]:
                module._parameters.pop(attribute, None)
                # setattr, not __dict__: nn.LSTM keeps a list of its weights up to date here.
                setattr(module, attribute, hole)
            # Lists, optimizers or closures of the user may still refer to the object.
            parameter.data = parameter.data.new_empty(0)
            self._freed[name] = (parameter, hole)

    @property
    def freed(self) -> tuple[str, ...]:
        """What has been taken out, whether or not it is back."""
        return tuple(self._freed)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Puts freed parameters back, with these values; ``free`` takes them out again."""
        for name, (parameter, hole) in self._freed.items():
            parameter = filled(parameter, values[name])
            self._freed[name] = (parameter, hole)
            for module, attribute in self._places[name]:
                module.__dict__.pop(attribute, None)
                setattr(module, attribute, parameter)
        for module in {id(m): m for places in self._places.values() for m, _ in places}.values():
            table = module._parameters
            ordered = {key: table[key] for key in self._order[id(module)] if key in table}
            ordered |= {key: value for key, value in table.items() if key not in ordered}
            table.clear()
            table.update(ordered)

    # -- parameters of other ranks, back for a while -----------------------------------------------

    def original(self, name: str) -> nn.Parameter:
        """The object that was taken out; it has no data while the hole is in its place."""
        return self._freed[name][0]

    def spec(self, name: str) -> Spec:
        """What a parameter is, here or elsewhere."""
        return (
            self._freed[name][1].spec if name in self._freed else Spec.of_parameter(self.find(name))
        )

    def take_out(self) -> bool:
        """Ends ``fill``; says whether a parameter was frozen or unfrozen since.

        Raises:
            ModelError: Somebody has put other parameters into their places.
        """
        changed = False
        for name, (parameter, hole) in self._freed.items():
            if any(m._parameters.get(a) is not parameter for m, a in self._places[name]):
                raise ModelError(
                    f"parameter {name} was replaced or removed during training. Stages and "
                    "optimizers hold the parameters that were there at the start: change their "
                    "values in place (copy_, mul_) instead, or use pp=1."
                )
            parameter.grad = None
            if parameter.requires_grad != hole.spec.requires_grad:
                changed = True
                hole.spec = replace(hole.spec, requires_grad=parameter.requires_grad)
                hole._meta = None
        self.free(self.freed)
        return changed

    @contextlib.contextmanager
    def listed(self) -> Iterator[None]:
        """Lets ``parameters()`` list the parameters of other ranks, by shape: of no use as data."""
        specs = {name: hole.spec for name, (_, hole) in self._freed.items()}
        self.fill({n: torch.zeros((), dtype=s.dtype).expand(s.shape) for n, s in specs.items()})
        try:
            yield
        finally:
            self.take_out()


def used_parameters(path: Path, start: Position, end: Position, calls: range) -> tuple[str, ...]:
    """Names of the parameters used after ``start`` and up to ``end``, in order of use."""
    names: dict[str, None] = {}
    for call, events in enumerate(path.events):
        for index, event in enumerate(events):
            if start < (call, index + 1) <= end:
                names.update(dict.fromkeys(event.parameters))
        if call in calls:
            names.update(dict.fromkeys(path.calls[call].parameters))
    return tuple(names)
