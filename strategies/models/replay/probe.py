"""The probe: one pass of the user's step in which every parameter is a hole.

Records calls, operations, the lifetime of every value, and what cannot be cut; ``probing.py`` turns
the record into a ``Path``. Refuses what no cut can make right, with the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from strategies.errors import ModelError
from strategies.models.collectives import is_collective
from strategies.models.flops import CostCounter
from strategies.models.nested import leaves, signature, tensors
from strategies.models.recording.recording import Entry, Tape
from strategies.models.replay.gate import STEP_FRAME
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    Spec,
    checkpoint_region,
    dataless,
    operation_name,
    user_line,
)
from strategies.models.replay.inference import Outcome, made_up_by
from strategies.models.replay.path import Call, Event, Key, Position
from strategies.models.replay.rows.draws import RunDraws
from strategies.models.replay.rows.packed_rows import note_size, varies
from strategies.models.replay.shape_mode import ShapeMode

_MOST_LOOKS = 30  # of one line, with layers called in between


@dataclass(slots=True)
class Value:
    """Life of one value: made at ``born``, used at ``uses`` and last at ``used`` (clock ticks).

    Where it ``varies``, its size depends on more than the batch's shape.
    """

    key: Key
    born: int
    spec: Spec
    storage: Any
    used: int = -1
    uses: list[int] = field(default_factory=list)
    region: FrameType | None = None
    varies: bool = False


@dataclass(slots=True)
class Place:
    """A moment at which the step could be cut: right after an operation or a unit's return."""

    event: int
    clock: int
    region: FrameType | None


@dataclass(slots=True)
class Record:
    """Everything a probe writes down; see ``path.py`` for the meaning of calls and events."""

    calls: list[Call] = field(default_factory=list)
    events: list[list[Event]] = field(default_factory=lambda: [[]])
    places: list[list[Place]] = field(default_factory=list)
    regions: list[FrameType | None] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    writes: list[tuple[int, Any]] = field(default_factory=list)
    uncuttable: list[tuple[int, int, str]] = field(default_factory=list)
    deferred: list[tuple[int, str]] = field(default_factory=list)
    written: dict[int, str] = field(default_factory=dict)  # buffers, by which of ``deferred``
    collectives: list[tuple[int, str]] = field(default_factory=list)
    left: list[tuple[str, tuple[int, int, int]]] = field(default_factory=list)
    refused: ModelError | None = None  # for those who make an error of their own of it
    drew: tuple[bool, bool] = (False, False)  # as of the path
    kept: list[Key] = field(default_factory=list)  # what the step keeps or returns


class LeakError(BaseException):
    """A layer hands on a value in an object of its own: what is in it has to be units instead.

    Passes through ``except Exception`` of the user's.
    """

    def __init__(self, unit: int) -> None:
        super().__init__(unit)
        self.unit = unit


class Probe(ShapeMode):
    """Records the path of one step; see ``Record``.

    ``names`` are the units' global ones. ``parameters`` has names by identity of the parameter (or
    of the hole that replaced it), ``buffers`` those of tensors that outlive the step. The ``cache``
    is filled for the replays, ``step`` is for messages, ``opens`` tells of a unit by its index
    whether those inside it could take its place; the step draws from ``draws``; the rest is as for
    ``ShapeMode``.
    """

    def __init__(
        self,
        units: list[nn.Module],
        names: tuple[str, ...],
        *,
        parameters: dict[int, str],
        buffers: dict[int, str],
        device: torch.device,
        cache: dict[Hashable, Outcome],
        step: str,
        opens: Callable[[int], bool] = lambda _: False,
        draws: Callable[[], RunDraws] | None = None,
    ) -> None:
        super().__init__(units, device, cache)
        self.draws = None if draws is None else draws()
        self._opens = opens
        self.record = Record()
        self.costs = CostCounter()
        self._names = names
        self._module_names = {
            id(child): f"{name}.{path}" if path else name
            for name, unit in zip(names, units, strict=True)
            for path, child in unit.named_modules()
        }
        self._parameters = parameters
        self._buffers = buffers
        self._step = step
        self._clock = 0
        self._call_parameters: dict[str, None] = {}
        self._norms: dict[int, int] = {}
        self._looks: dict[str, frozenset[int]] = {}  # per line, behind how many calls
        self.record.places.append([Place(0, 0, None)])
        self.tape = Tape(copies=True)
        # For each entry of the tape, where what it gives is stored: as meta tensors are.
        self.outputs: list[tuple[Hashable, ...]] = []
        self._stored: list[Any] = []  # or numbers of storages would be given away again

    # Looks at values that get the other answer than a zero gives, by number.
    turned: Collection[int] = ()

    def tracked(self, tensor: Tensor) -> bool:
        """Also tensors that a layer computed from made-up data: their use is refused."""
        return super().tracked(tensor) or made_up_by(tensor) is not None

    # -- calls -----------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except ModelError as error:
            self.record.refused = self.record.refused or error
            raise

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        call = len(self.record.calls)
        line = user_line()
        region = self._region()
        self._clock += 1
        key = ("unit", index, torch.is_grad_enabled(), signature((args, kwargs)))
        start = self.costs.cost
        owned = (self._parameters[id(p)] for p in _parameters_of(self.units[index]))
        self._call_parameters = dict.fromkeys(owned)
        given = list(leaves((args, kwargs)))
        entry = self.tape.begin(index, forward, args, kwargs, STEP_FRAME)
        outcome, holes = self.infer_unit(index, forward, args, kwargs, call)
        if any(isinstance(leaf, GeneratorType) for leaf in leaves(outcome.template)):
            self._refuse_generator(index, line)
        if not outcome.exact:  # ran on made-up data, where uses cannot be seen
            self._note_uses(tuple(t for t in given if isinstance(t, Hole) and t.value is not None))
        self._clock += 1
        result, produced = self.give(outcome, holes, given)
        if outcome.exact:
            self._cache[key] = outcome
        known = {id(leaf) for leaf in given}
        tracked = tuple(id(tensor) not in known for tensor in produced)
        self.record.calls.append(
            Call(
                unit=index,
                line=line,
                cost=max(1.0, self.costs.cost - start),
                tracked=tracked,
                effects=tuple(
                    (self._module_names[id(effect.module)], effect.attribute)
                    for effect in outcome.effects
                ),
                parameters=tuple(self._call_parameters),
            )
        )
        self.record.regions.append(region)
        self.record.events.append([])
        self._note_births((call + 1, 0), produced, tracked, region)
        self._note_entry(entry, (call + 1, 0), produced)
        self.record.places.append([Place(0, self._clock, region)])
        self._note_running_statistics(index, call)
        self.costs.random = False
        return result

    def on_inner_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        self._note_uses(args, kwargs)
        storages = self._storages(args, kwargs)
        result = super().on_inner_operation(func, args, kwargs)
        note_size(func, args, kwargs, result)
        self._note_writes(storages)
        return result

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self.draws is not None and self._inside is None:
            result = self.draws.draw(func, args, kwargs)
        else:
            result = super().plain(func, args, kwargs)
        note_size(func, args, kwargs, result)
        return result

    # -- operations between calls ----------------------------------------------------------

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        known, answer = dataless(func, args, kwargs)
        if known:
            return answer
        name = operation_name(func)
        self._refuse(func, name, args)
        if is_collective(func):
            called = f"{user_line()}: {name} is called"
            self.record.collectives.append((len(self.record.calls), called))
        region = self._region()
        self._clock += 1
        parameters = self._note_uses(args, kwargs)
        storages = self._storages(args, kwargs)
        key = ("operation", func, torch.is_grad_enabled(), signature((args, kwargs)))
        self.costs.random = False
        entry = self.tape.begin(None, func, args, kwargs, STEP_FRAME)
        outcome, metas = self.infer(func, args, kwargs)
        self._refuse_writes(outcome, name, args, kwargs)
        if outcome.dependent:
            self._defer(f"{name} needs data of another stage")
        elif outcome.exact:
            self._cache[key] = outcome
        result = self.instantiate(outcome, metas, args, kwargs)
        if outcome.dependent and len(self.record.deferred) - 1 in self.turned:
            result = _other_answer(result)
        note_size(func, args, kwargs, result)
        self._note_writes(storages)
        produced = [args[0]] if name == "__setitem__" else tensors(result)
        if produced:
            call, events = len(self.record.calls), self.record.events[-1]
            tracked = tuple(isinstance(tensor, Hole) for tensor in produced)
            events.append(Event(name, user_line(), tracked, self.costs.random, parameters))
            self._note_births((call, len(events)), produced, tracked, region)
            self._note_entry(entry, (call, len(events)), produced)
            self.record.places[call].append(Place(len(events), self._clock, region))
        return result

    def on_read(self, value: Any) -> None:
        """Notes that a log call reads ``value``, or the step returns it."""
        self._clock += 1
        self._note_uses((value,))

    # -- bookkeeping -----------------------------------------------------------------------

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of a parameter, of any rank."""
        return self._parameters.get(id(tensor))

    def storage_of(self, tensor: Tensor) -> Hashable:
        """What values that share memory have in common."""
        storage = self.twin(tensor).untyped_storage()
        self._stored.append(storage)
        return int(storage._cdata)

    def _note_entry(self, entry: Entry, position: Position, produced: list[Tensor]) -> None:
        entry.position = position
        entry.numbers = tuple(t.value if isinstance(t, Hole) else None for t in produced)
        self.tape.entries.append(entry)
        self.outputs.append(
            tuple(self.storage_of(t) if isinstance(t, Hole) else ("real", id(t)) for t in produced)
        )

    def _note_births(
        self,
        position: Position,
        produced: list[Tensor],
        tracked: Sequence[bool],
        region: FrameType | None,
    ) -> None:
        seen: set[int] = set()
        for ordinal, (hole, new) in enumerate(zip(produced, tracked, strict=True)):
            if new and id(hole) not in seen:
                seen.add(id(hole))
                assert isinstance(hole, Hole)
                hole.value = len(self.record.values)
                hole.unit = None
                storage = hole.shape_tensor().untyped_storage()
                key = (*position, ordinal)
                value = Value(key, self._clock, hole.spec, storage, region=region)
                value.varies = varies(hole)
                self.record.values.append(value)

    def _note_uses(self, args: Any, kwargs: Any = None) -> tuple[str, ...]:
        """Prolongs the life of the holes used; gives the names of the parameters used."""
        names: dict[str, None] = {}
        for tensor in tensors((args, kwargs)):
            if id(tensor) in self._parameters:
                names[self._parameters[id(tensor)]] = None
            elif isinstance(tensor, Hole):
                if tensor.value is not None:
                    value = self.record.values[tensor.value]
                    value.used = self._clock
                    value.uses.append(self._clock)
                elif tensor.unit is not None and tensor.unit != self._inside:
                    self._note_hidden(tensor.unit)
            elif (maker := made_up_by(tensor)) is not None:
                self._note_hidden(maker)
        if self._inside is not None:
            self._call_parameters.update(names)
        return tuple(names)

    def _note_hidden(self, maker: int) -> None:
        """A value left a unit neither by its result nor by an attribute of its own modules."""
        call = self.record.calls[maker]
        name = self._names[call.unit]
        if self._opens(call.unit):
            raise LeakError(call.unit)
        if self._inside is None:
            raise ModelError(
                f"{user_line()}: {self._step} uses a value that {name} (called at {call.line}) put "
                "into a list, dict or object it was given. Other stages do not run that layer and "
                "cannot see it; return the value from the layer instead."
            )
        self.record.uncuttable.append(
            (maker + 1, self._inside, f"{name} shares a list, dict or object with a later layer")
        )

    def _refuse_generator(self, index: int, line: str) -> None:
        """What a layer yields is computed when the step asks for it: by what is in the layer."""
        if self._opens(index):
            raise LeakError(index)
        raise ModelError(
            f"{line}: {self._names[index]} is a generator (yield), which computes its values after "
            f"the call. Return them in a list or tuple, so that {self._step} can be cut behind it."
        )

    def _note_running_statistics(self, index: int, call: int) -> None:
        for norm in self.units[index].modules():
            if isinstance(norm, _BatchNorm) and norm.training and norm.track_running_stats:
                first = self._norms.setdefault(id(norm), call)
                if first != call:
                    name = self._names[index]
                    reason = f"{name} is called several times and keeps running statistics"
                    self.record.uncuttable.append((first + 1, call, reason))

    def _storages(self, args: Any, kwargs: Any) -> list[tuple[Any, Tensor, int]]:
        found = []
        for tensor in tensors((args, kwargs)):
            if isinstance(tensor, Hole | nn.Parameter):
                meta = self.twin(tensor)
                found.append((meta.untyped_storage(), meta, meta._version))
        return found

    def _note_writes(self, storages: list[tuple[Any, Tensor, int]]) -> None:
        for storage, meta, version in storages:
            if meta._version != version:
                self.record.writes.append((self._clock, storage))

    def _region(self) -> FrameType | None:
        region, reentrant = checkpoint_region(STEP_FRAME)
        if reentrant:
            raise ModelError(
                f"{user_line()}: reentrant activation checkpointing cannot be cut into stages. "
                "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
            )
        return region

    def _defer(self, what: str) -> None:
        """Allowed after the last layer only, where one stage has everything: decided at the end."""
        line, calls = user_line(), len(self.record.calls)
        self._looks[line] = self._looks.get(line, frozenset()) | {calls}
        # A loop over rows looks behind one layer; one that calls layers in between generates.
        if len(self.record.deferred) > 1000 or len(self._looks[line]) > _MOST_LOOKS:
            raise ModelError(
                f"{self.record.deferred[0][1]} in a loop that does not end. Keep it a tensor "
                "(torch.where, masks), or let the batch's shape end the loop."
            )
        self.record.deferred.append((calls, f"{line}: {what}"))

    def _refuse(self, func: Function, name: str, args: Args) -> None:
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            raise ModelError(
                f"{user_line()}: {name} inside {self._step}. The pipeline runs the backward pass "
                "itself, one stage at a time, so the step cannot take gradients of its own. "
                "Return a loss without second-order terms, or use pp=1."
            )
        if getattr(func, "__name__", "") in ("__set__", "__delete__"):
            raise ModelError(
                f"{user_line()}: assigning .{name} inside {self._step} cannot be cut into stages. "
                "Do it in on_train_batch_end, where every stage has its own parameters."
            )

    def _refuse_writes(self, outcome: Outcome, name: str, args: Args, kwargs: Kwargs) -> None:
        given = list(leaves((args, kwargs)))
        own = [meta.untyped_storage() for meta in self._twins.values()]
        for index, _ in outcome.mutated:
            tensor = given[index]
            storage = self.twin(tensor).untyped_storage() if isinstance(tensor, Hole) else None
            if id(tensor) in self._parameters or any(storage is other for other in own):
                raise ModelError(
                    f"{user_line()}: {name} changes a parameter inside {self._step}. Every stage "
                    "replays the step, so the change would happen too often or not at all. Do it "
                    "in on_train_batch_end, where every stage changes its own parameters."
                )
            if isinstance(tensor, Hole):
                continue
            if id(tensor) in self._buffers:
                self.record.written[len(self.record.deferred)] = self._buffers[id(tensor)]
                self._defer(
                    f"{name} writes a value of another stage into {self._buffers[id(tensor)]}"
                )
            if tensor._is_view():
                raise ModelError(
                    f"{user_line()}: {name} writes a value that depends on parameters into a part "
                    "of a tensor that does not. Other stages cannot follow that; build the tensor "
                    "with torch.stack or torch.cat, or write out[...] = value directly."
                )


def _other_answer(value: Any) -> Any:
    return type(value)(not value) if isinstance(value, bool | int | float) else value


def _parameters_of(module: nn.Module) -> list[Any]:
    """Parameters of a module and the holes that stand for those of other ranks."""
    found: dict[int, Any] = {}
    for child in module.modules():
        for table in (child._parameters, vars(child)):
            for value in table.values():
                hole = isinstance(value, Hole) and value.parameter is not None
                if hole or isinstance(value, nn.Parameter):
                    found[id(value)] = value
    return list(found.values())
