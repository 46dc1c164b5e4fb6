"""A step of one microbatch as data: calls of layers, operations between them, and log calls.

The user's Python runs once per microbatch, on placeholders, and writes a ``Recording``. Stages
execute their part of it (``execution.py``). A value has a number; an argument that is a value of
the step is a ``Ref`` to it, everything else (what the batch alone decides, parameters, options) is
in the entry as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strategies.models.contents import KeptObjects
from strategies.models.nested import is_plain, leaves, rebuild
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    checkpoint_region,
    operation_name,
)
from strategies.models.replay.path import Key, Position
from strategies.models.state import cuda_is_used


class Ref:
    """Place of value ``number`` among the arguments of an entry."""

    # No dataclass: containers are searched for places, and dataclasses are containers.
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Fresh:
    """A tensor of the batch alone into which its entry writes: each execution has a copy."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Modes(NamedTuple):
    """What is switched on where an entry runs: gradients, autocast, kernels of attention."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    attention: tuple[bool, ...]

    @classmethod
    def now(cls) -> Modes:
        autocast: tuple[tuple[str, bool, torch.dtype], ...] = (
            ("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        )
        if cuda_is_used():
            now = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            autocast += (("cuda", *now),)
        attention = (
            _C._get_flash_sdp_enabled(),
            _C._get_mem_efficient_sdp_enabled(),
            _C._get_math_sdp_enabled(),
            _C._get_cudnn_sdp_enabled(),
        )
        return cls(torch.is_grad_enabled(), autocast, attention)


_C: Any = torch._C


@dataclass(frozen=True, slots=True)
class Region:
    """One call of ``torch.utils.checkpoint.checkpoint``, by its number in the step."""

    number: int
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What ``self.log`` was given: ``value`` is frozen as arguments are."""

    name: str
    value: Any
    options: dict[str, Any]
    metric: str | None


@dataclass(slots=True)
class Entry:
    """One call.

    Attributes:
        position: Of the step behind it; see ``replay/path.py``.
        unit: Index of the layer; None for an operation, or a log call.
        call: The layer's forward or the torch function.
        args: Arguments with ``Ref`` and ``Fresh``.
        kwargs: The same by name.
        uses: Numbers of the values among them.
        numbers: Of the tensors that it gives, in order; None for one that it was given.
        written: Places among the arguments' leaves that become values, with their numbers.
        effects: Attributes that a layer sets, whose tensors follow those of its result.
        modes: What is switched on.
        region: The activation checkpoint around it.
        objects: Objects among a layer's arguments as they were.
        shared: Lists and dicts among them, by place or name, with their identity: a layer may add
            something for the next one.
        log: Of a log call.
    """

    position: Position
    unit: int | None
    call: Function
    args: Args
    kwargs: Kwargs
    modes: Modes
    uses: tuple[int, ...] = ()
    numbers: tuple[int | None, ...] = ()
    written: tuple[tuple[int, int], ...] = ()
    effects: tuple[tuple[nn.Module, str], ...] = ()
    region: Region | None = None
    objects: KeptObjects | None = None
    shared: dict[int | str, int] = field(default_factory=dict)
    log: LogEntry | None = None

    @property
    def mark(self) -> tuple[Any, ...]:
        """What it is (a layer's index, a name), its values, and those it is given."""
        name: int | str = operation_name(self.call) if self.unit is None else self.unit
        if self.log is not None:
            name = self.log.name
        return name, self.numbers, self.uses, self.modes.grad

    @property
    def is_hook(self) -> bool:
        """Whether it only sets a hook on a value."""
        return self.log is None and not self.numbers and not self.written


@dataclass(slots=True)
class Recording:
    """The entries of a step up to its last layer, and the number of each value by its key."""

    entries: list[Entry]
    numbers: dict[Key, int]


_WRITTEN = 1 << 20  # ordinals of values that entries do not give


class Tape:
    """Writes entries while a step runs.

    Args:
        copies: Whether the step writes into tensors that it has given to a layer or an operation,
            so that each entry needs the value that it was given.

    Attributes:
        rewritten: Whether the step has done so.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self.entries: list[Entry] = []
        self.numbers: dict[Key, int] = {}
        self.rewritten = False
        self._used: list[int] = []
        self._copies = copies
        # Tensors of the batch alone, by identity, with their versions; kept, so that no other
        # tensor gets the identity.
        self._constants: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._regions: dict[int, tuple[FrameType, Region]] = {}

    def begin(
        self, unit: int | None, call: Function, args: Args, kwargs: Kwargs, stop: Any
    ) -> Entry:
        """An entry with its arguments, before what it calls has changed any of them."""
        self._used = []
        given, named = rebuild((args, kwargs), self.frozen)
        uses = tuple(self._used)
        entry = Entry((0, 0), unit, call, given, named, Modes.now(), uses)
        entry.region = self._region(stop)
        if unit is not None:
            objects = [leaf for leaf in leaves((args, kwargs)) if _may_change(leaf)]
            entry.objects = KeptObjects(objects) if objects else None
            everything: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            entry.shared = {
                place: id(each) for place, each in everything if type(each) in (list, dict)
            }
        return entry

    def end(
        self, entry: Entry, position: Position, produced: list[Tensor], known: set[int]
    ) -> None:
        """Numbers what an entry gives; ``known`` are identities of what it was given."""
        entry.position = position
        numbers: list[int | None] = []
        seen = set(known)
        for ordinal, tensor in enumerate(produced):
            new = isinstance(tensor, Hole) and id(tensor) not in seen
            numbers.append(self._number(tensor, (*position, ordinal)) if new else None)
            seen.add(id(tensor))
        entry.numbers = tuple(numbers)
        self.entries.append(entry)

    def write(self, entry: Entry, place: int, tensor: Any) -> None:
        """A leaf of the arguments that has become a value, though the entry does not give it."""
        key = (*entry.position, _WRITTEN + place)
        entry.written += ((place, self._number(tensor, key)),)

    def log(
        self, position: Position, name: str, value: Any, options: dict[str, Any], metric: str | None
    ) -> None:
        self._used = []
        log = LogEntry(name, rebuild(value, self.frozen), options, metric)
        entry = Entry(position, None, _log, (), {}, Modes.now())
        entry.log, entry.uses = log, tuple(self._used)
        self.entries.append(entry)

    def frozen(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
            return leaf
        if isinstance(leaf, Hole):
            if leaf.value is None:
                return leaf
            self._used.append(leaf.value)
            return Ref(leaf.value)
        if type(leaf) is not Tensor:
            return leaf
        version = -1 if leaf.is_inference() else leaf._version
        if id(leaf) in self._constants:
            _, alias, before = self._constants[id(leaf)]
            if version == before:
                return alias
            self.rewritten = True
        alias = leaf if leaf.requires_grad else leaf.detach()
        if self._copies:
            alias = alias.clone()
        self._constants[id(leaf)] = (leaf, alias, version)
        return alias

    def is_rewritten(self) -> bool:
        """Whether the step has written into what entries hold as it was before."""
        return self.rewritten or any(
            version >= 0 and not isinstance(leaf, Hole) and leaf._version != version
            for leaf, _, version in self._constants.values()
        )

    def recording(self) -> Recording:
        """What has been written; the tape lets go of the user's frames and tensors."""
        self._constants.clear()
        self._regions.clear()
        return Recording(self.entries, self.numbers)

    def _number(self, tensor: Any, key: Key) -> int:
        number = self.numbers[key] = len(self.numbers)
        tensor.value, tensor.unit = number, None
        return number

    def _region(self, stop: Any) -> Region | None:
        if _C._autograd._top_saved_tensors_default_hooks(True) is None:
            return None  # As an activation checkpoint sets some.
        frame, _ = checkpoint_region(stop)
        if frame is None:
            return None
        if id(frame) not in self._regions:
            given = frame.f_locals
            options = {"preserve_rng_state": given.get("preserve", True)}
            names = ("context_fn", "determinism_check", "debug", "early_stop")
            options |= {name: given[name] for name in names if name in given}
            self._regions[id(frame)] = (frame, Region(len(self._regions), options))
        return self._regions[id(frame)][1]


def _may_change(leaf: Any) -> bool:
    """Whether a layer may change what is in an object that it is given: a cache, a record."""
    if isinstance(leaf, Tensor | nn.Module | type) or is_plain(leaf) or callable(leaf):
        return False
    return hasattr(leaf, "__dict__")


def _log() -> None:
    raise AssertionError("a log call is no call")
