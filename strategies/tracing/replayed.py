"""Figures of a model's units: those that it declares, or else what its replay's probe has seen.

The graph of any other LightningModule is the one that the runtime cuts: its units, the places of
its cuts, and the values that cross them. Operations between units belong to the unit on whose side
of a cut they lie.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.models.logs import captured_logs
from strategies.models.nested import rebuild
from strategies.models.recording.recording import Entry, Ref
from strategies.models.replay.hole import Args, Hole, Kwargs, Spec, operation_name
from strategies.models.replay.layout import group_calls
from strategies.models.replay.path import Boundary, Cut, Key, Path, Position, used_parameters
from strategies.models.replay.probe import Probe
from strategies.models.replay.probing import probe_units
from strategies.models.snapshot import restoring
from strategies.models.unit_model import HasUnits, UnitModel
from strategies.tracing.equal_calls import Slot
from strategies.tracing.figures import ExpertLayer, Figures, Tracer

_SHORT = 24  # letters of an argument that a line shows


def trace_replayed(
    module: LightningModule, batch: Any, tracer: Tracer, *, chain: str | None = None
) -> ModelFigures:
    """All units on one microbatch; ``chain`` is as for ``ReplayModel.probe``.

    Raises:
        ModelError: The step cannot be cut into stages, or a layer cannot be traced.
    """
    made: list[Probe] = []

    def make(*args: Any, **kwargs: Any) -> Probe:
        made.append(Probe(*args, **kwargs))
        return made[-1]

    probed = probe_units(module, batch, "train", chain, make)
    with restoring(module):  # What runs on fakes must not stay in a module's attributes.
        return _figures(probed.path, made[-1], list(probed.units.values()), tracer)


def _figures(path: Path, probe: Probe, modules: list[nn.Module], tracer: Tracer) -> ModelFigures:
    groups = group_calls(path)
    units = [UnitFigures(path.name(calls.start)) for calls in groups]
    cuts = [path.cuts[calls.start] for calls in groups]
    starts = [cut.position for cut in cuts if isinstance(cut, Cut)]
    assert len(starts) == len(groups)
    starts[0] = (0, -1)
    ends: list[Position] = [*starts[1:], (len(path.calls), len(path.events[-1]))]
    for number, (calls, start, end) in enumerate(zip(groups, starts, ends, strict=True)):
        units[number].parameters = dict.fromkeys(used_parameters(path, start, end, calls))
        units[number].cost = sum(path.calls[call].cost for call in calls)
    for place, (entry, outputs) in enumerate(zip(probe.tape.entries, probe.outputs, strict=True)):
        args, kwargs, inputs = _with_slots(entry, probe)
        if entry.objects is not None:  # A cache among them, say, to which layers have added.
            entry.objects.restore()
        if entry.unit is not None:
            call = entry.position[0] - 1
            number = next(i for i, calls in enumerate(groups) if call in calls)
            name = path.name(call)
            figures = tracer.layer(name, modules[entry.unit], args, kwargs)
        else:
            number = next(
                (i for i, end in enumerate(ends) if entry.position <= end), len(groups) - 1
            )
            name = f"{operation_name(entry.call)} between {units[number].name} and the next"
            figures = tracer.operation(name, entry.call, args, kwargs)
        units[number].recorded.append(_line(entry, name.partition(" ")[0], probe))
        units[number].add(
            figures, call=place, inputs=inputs, outputs=outputs, layer=entry.unit is not None
        )
    return ModelFigures(tuple(units), _crossing(path, groups))


def _with_slots(entry: Entry, probe: Probe) -> tuple[Args, Kwargs, tuple[Hashable, ...]]:
    """Arguments with slots for values and parameters, and the keys of the values, each once."""
    slots: dict[Any, Slot] = {}

    def slot(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            value = probe.record.values[leaf.number]
            key: Hashable = leaf.number
            found = Slot(_on_cpu(value.spec), int(value.storage._cdata))
        elif isinstance(leaf, Hole | nn.Parameter):
            parameter = not isinstance(leaf, Hole) or leaf.parameter is not None
            spec = leaf.spec if isinstance(leaf, Hole) else Spec.of(leaf)
            key = id(leaf)
            found = Slot(_on_cpu(spec), probe.storage_of(leaf), parameter=parameter)
        else:
            return leaf
        return slots.setdefault(key, found)

    args, kwargs = rebuild((entry.args, entry.kwargs), slot)
    keys = dict.fromkeys(found.key for found in slots.values() if not found.parameter)
    return args, kwargs, tuple(keys)


def _line(entry: Entry, name: str, probe: Probe) -> str:
    """An entry of a recording as a line: what it gives, what it is, what it takes."""

    def text(leaf: Any) -> str:
        if isinstance(leaf, Ref):
            return f"%{leaf.number}"
        if isinstance(leaf, Tensor):
            parameter = probe.name_of(leaf)
            return parameter or f"batch {list(leaf.shape)}"
        if isinstance(leaf, list | tuple):
            return f"[{', '.join(map(text, leaf))}]"
        short = repr(leaf)
        return short if len(short) <= _SHORT else type(leaf).__name__

    given = [text(arg) for arg in entry.args]
    given += [f"{key}={text(value)}" for key, value in entry.kwargs.items()]
    made = [
        f"%{number} {list(probe.record.values[number].spec.shape)}"
        for number in entry.numbers
        if number is not None
    ]
    return f"{', '.join(made)} = {name}({', '.join(given)})" if made else f"{name}({given})"


def _on_cpu(spec: Spec) -> Spec:
    return replace(spec, device=torch.device("cpu"))


def _crossing(
    path: Path, groups: tuple[range, ...]
) -> tuple[tuple[int, tuple[int, ...], int], ...]:
    """Every value that crosses a cut: the unit that makes it, those that use it, its bytes."""
    clocks: list[int] = []
    crossing: dict[Key, list[int]] = {}
    boundaries: dict[Key, Boundary] = {}
    for number, calls in enumerate(groups):
        cut = path.cuts[calls.start]
        assert isinstance(cut, Cut)
        clocks.append(cut.clock)
        for boundary in cut.tensors if number else ():
            crossing.setdefault(boundary.key, []).append(number)
            boundaries[boundary.key] = boundary
    found = []
    for key, numbers in crossing.items():
        # It crosses the cuts in front of these units.
        boundary = boundaries[key]
        users = [
            number
            for number in range(numbers[0], numbers[-1] + 1)
            if boundary.changed
            or any(
                clocks[number] < use and (number + 1 == len(clocks) or use <= clocks[number + 1])
                for use in boundary.uses
            )
        ]
        users = sorted({*users, numbers[-1]})
        found.append((numbers[0] - 1, tuple(users), boundary.spec.num_bytes))
    return tuple(sorted(found))


def trace_declared(module: nn.Module, batch: Any, tracer: Tracer) -> ModelFigures:
    """All units of a module with ``pipeline_units()``, each on what the one before has made.

    The last one's figures include the loss.

    Raises:
        ModelError: A unit cannot be traced.
    """
    assert isinstance(module, HasUnits)
    units: list[UnitFigures] = []
    tensors: list[tuple[int, tuple[int, ...], int]] = []
    args: Args = module.pipeline_inputs(batch)
    keys: tuple[Any, ...] = ()
    declared, costs = module.pipeline_units(), UnitModel(module).units
    for index, (name, unit) in enumerate(declared):
        found = UnitFigures(name, cost=costs[index].cost)
        figures = tracer.layer(name, unit, args, {})
        found.parameters = {f"{name}.{own}": None for own, _ in unit.named_parameters()}
        given = keys
        keys = tuple(("edge", index, number) for number in range(len(figures.outputs)))
        args = tuple(map(_slot, figures.outputs, keys))
        found.add(figures, call=index, inputs=given, outputs=keys, layer=True)
        units.append(found)
        if index + 1 < len(declared):
            size = sum(spec.num_bytes for spec in figures.outputs)
            tensors.append((index, (index + 1,), size))

    def result(*outputs: Tensor) -> Any:
        with captured_logs(module):
            return module.pipeline_result(outputs, batch, 0, "train")

    figures = tracer.operation("pipeline_result()", result, args, {})
    units[-1].add(figures, call="result", inputs=keys, outputs=(), layer=False)
    return ModelFigures(tuple(units), tuple(tensors))


def _slot(spec: Spec, key: Any) -> Slot:
    grad = spec.requires_grad and (spec.dtype.is_floating_point or spec.dtype.is_complex)
    return Slot(replace(spec, device=torch.device("cpu"), requires_grad=grad), key)


# -- from the figures of calls to those of units ---------------------------------------------------


@dataclass(slots=True)
class UnitFigures:
    """What one unit takes at one number of rows, all its calls and operations together.

    Attributes:
        kept: Bytes by the storage that is kept: a value's key, or one of the call's own.
        again_kept: The same where it recomputes selectively; likewise the FLOPs of products and
            the elements of all else that then runs again.
        runs_again: Whether that could be found out.
        parameters: Names of the parameters that it uses.
        unknown: Operations without a formula.
        experts: Of its layers that have some.
        cost: By which ranks balance their stages.
        recorded: The entries of the step's recording, a line each.
    """

    name: str
    forward_flops: float = 0.0
    input_flops: float = 0.0
    weight_flops: float = 0.0
    kept: dict[Hashable, int] = field(default_factory=dict)
    again_flops: float = 0.0
    again_elements: float = 0.0
    again_kept: dict[Hashable, int] = field(default_factory=dict)
    runs_again: bool = True
    parameters: dict[str, None] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    experts: tuple[ExpertLayer, ...] = ()
    cost: float = 1.0
    recorded: list[str] = field(default_factory=list)

    def add(
        self,
        figures: Figures,
        *,
        call: Hashable,
        inputs: Sequence[Hashable],
        outputs: Sequence[Hashable],
        layer: bool,
    ) -> None:
        """Adds a call; ``call`` tells it from all others.

        ``inputs`` are the keys of the values that it was given, each once, in order; ``outputs``
        those of the tensors that it returned; ``layer``: whether it is one, which may recompute.
        """
        self.forward_flops += figures.forward_flops
        self.input_flops += figures.input_flops
        self.weight_flops += figures.weight_flops
        self.unknown.update(figures.unknown)
        self.experts += figures.experts
        again = figures.again
        self.runs_again = self.runs_again and (again is not None or not layer)
        if again is not None:
            self.again_flops += again.flops
            self.again_elements += again.elements
        kept_again = figures.kept if again is None else again.kept
        for kept, entries in ((self.kept, figures.kept), (self.again_kept, kept_again)):
            for number, entry in enumerate(entries):
                key: Hashable = ("own", call, number)
                if entry.origin == "input":
                    key = inputs[entry.index]
                elif entry.origin == "output" and entry.index < len(outputs):
                    key = outputs[entry.index]
                kept[key] = max(entry.num_bytes, kept.get(key, 0))


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """A model at one number of rows; tensors are (producer, consumers, bytes) between units."""

    units: tuple[UnitFigures, ...]
    tensors: tuple[tuple[int, tuple[int, ...], int], ...]


def saved_bytes(units: Sequence[UnitFigures], number: int) -> int:
    """What a unit keeps beyond what the one before it keeps anyway."""
    return _beyond([unit.kept for unit in units], number)


def again_bytes(units: Sequence[UnitFigures], number: int) -> int:
    """The same where all of them recompute selectively."""
    return _beyond([unit.again_kept for unit in units], number)


def _beyond(kept: Sequence[dict[Hashable, int]], number: int) -> int:
    before = kept[number - 1] if number else {}
    return sum(size for key, size in kept[number].items() if key not in before)
