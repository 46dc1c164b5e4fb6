"""What a step touches besides its graph: numbers for the host, module state, random generators."""

from __future__ import annotations

import contextlib
import random
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.replay.hole import Hole


class Fetch:
    """A copy in host memory, started and not waited for; without a device the tensor itself.

    Reading a number with ``float()`` or ``.cpu()`` waits for everything that the device has been
    given so far. This copy is waited for alone, and usually is there already.

    ``stream`` copies beside the current stream, behind what that has been given so far; the tensor
    must not be written to before ``tensor`` has returned.
    """

    def __init__(self, tensor: Tensor, *, stream: torch.cuda.Stream | None = None) -> None:
        self._there: Any = None
        # The allocator would give its memory to the current stream's next tensor.
        self._source = None if stream is None else tensor
        beside: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if stream is not None and tensor.is_cuda:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            beside = torch.cuda.stream(stream)
        with beside:
            # Copies that do not block go to pinned memory.
            self._copy = tensor.detach().to("cpu", non_blocking=True)
            if tensor.is_cuda:
                self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._there.record(torch.cuda.current_stream(tensor.device))

    def tensor(self) -> Tensor:
        if self._there is not None:
            self._there.synchronize()
            self._there = self._source = None
        return self._copy


# -- module state --------------------------------------------------------------------------------
#
# What a forward changes in its module besides gradients: running statistics, counters, metrics.
#
# A forward that runs twice for one microbatch must find this state as it was the first time, and
# must leave it as if it had run once. Copying all of it for every microbatch would cost time and
# memory, and mostly nothing changes: what does is found by a close look at a stage's first forward.

_ABSENT: Any = object()
_AS_IT_IS: Any = object()
# A module's own bookkeeping, the same in all of them; buffers are looked at by name.
_BOOKKEEPING = frozenset(nn.Module().__dict__)

Before = list[tuple["Slot", Any]]
"""Changing slots, each with what the second run of a forward is to find there."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a module that has a value: ``key`` in its buffers or in its attributes."""

    name: str
    table: dict[str, Any]
    key: str
    buffer: bool

    @property
    def value(self) -> Any:
        return self.table.get(self.key, _ABSENT)

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


class ModuleState:
    """Keeps what a stage's forward changes in a module, for its second run."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: dict[int, list[tuple[Slot, _Change]]] = {}
        self._quiet: dict[int, list[Slot]] = {}  # buffers that do not change

    @contextlib.contextmanager
    def kept(self, stage: int) -> Iterator[Before]:
        """Around a forward; the list is complete behind it.

        Raises:
            ModelError: A buffer changes that the stage's first forward left alone.
        """
        before: Before = []
        if stage not in self._changing:
            seen = [_Seen(slot) for slot in _slots(self._module)]
            yield before
            before += self._learn(stage, seen)
            return
        before += [(slot, _taken(slot.value, how)) for slot, how in self._changing[stage]]
        watched = [(slot, slot.value, _version(slot.value)) for slot in self._quiet[stage]]
        yield before
        for slot, value, version in watched:
            if slot.value is not value or _version(value) != version:
                raise ModelError(
                    f"buffer {slot.name} was changed by a forward of stage {stage}, but not by the "
                    "stage's first one, so its value from before was not kept, and recomputing "
                    "needs it. Change it in every forward, or use recompute=none."
                )

    def _learn(self, stage: int, seen: list[_Seen]) -> Before:
        changed = [(entry, how) for entry in seen if (how := entry.change()) is not None]
        known = {(id(entry.slot.table), entry.slot.key) for entry in seen}
        new = [slot for slot in _slots(self._module) if (id(slot.table), slot.key) not in known]
        self._changing[stage] = [(entry.slot, how) for entry, how in changed]
        self._changing[stage] += [(slot, _rebound(slot)) for slot in new]
        changing = {id(entry) for entry, _ in changed}
        self._quiet[stage] = [
            entry.slot
            for entry in seen
            if entry.slot.buffer and id(entry) not in changing and _is_data(entry.value)
        ]
        before: Before = [
            (entry.slot, entry.copy if how == "inside" else _taken(entry.value, how))
            for entry, how in changed
        ]
        return before + [(slot, _ABSENT) for slot in new]


@contextlib.contextmanager
def put_back(before: Before) -> Iterator[None]:
    """Inside, the module is what it was before a forward; afterwards what it is now."""
    now = [(slot, slot.value) for slot, _ in before]
    for slot, value in before:
        if value is not _AS_IT_IS:
            slot.put(value)
    try:
        yield
    finally:
        for slot, value in now:
            slot.put(value)


_Change = Literal["inside", "value", "result"]
"""A tensor or container is changed in place, another value takes its place, or a fresh result does.

No forward reads a result of the one before, so it need not be kept, and it may be large.
"""


class _Seen:
    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.value = slot.value
        self.copy = _copy(self.value)
        self._version = _version(self.value)

    def change(self) -> _Change | None:
        """What a forward has done to it since."""
        if self.slot.value is not self.value:
            return _rebound(self.slot)
        if _is_data(self.value):
            # Batch norm updates its statistics without counting that as a change.
            same = _version(self.value) == self._version and torch.equal(self.value, self.copy)
            return None if same else "inside"
        if type(self.value) in (list, dict, set):
            return None if _same_items(self.value, self.copy) else "inside"
        return None


def _rebound(slot: Slot) -> _Change:
    return "value" if slot.buffer or not isinstance(slot.value, Tensor) else "result"


def _taken(value: Any, how: _Change) -> Any:
    if how == "inside":
        return _copy(value)
    return _AS_IT_IS if how == "result" else value


def _copy(value: Any) -> Any:
    """A copy of what can be changed in place."""
    if _is_data(value):
        return value.detach().clone()
    return value.copy() if type(value) in (list, dict, set) else value


def _is_data(value: Any) -> bool:
    real = isinstance(value, Tensor) and not isinstance(value, nn.Parameter | Hole)
    return real and not value.is_meta


def _version(value: Any) -> int:
    return value._version if _is_data(value) else 0


def _same_items(value: Any, copy: Any) -> bool:
    if len(value) != len(copy):
        return False
    if isinstance(value, dict):
        value, copy = value.values(), copy.values()
    return all(first is second for first, second in zip(value, copy, strict=True))


def _slots(module: nn.Module) -> Iterator[Slot]:
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        for key in child._buffers:
            yield Slot(prefix + key, child._buffers, key, True)
        for key in list(child.__dict__):
            if key not in _BOOKKEEPING:
                yield Slot(prefix + key, child.__dict__, key, False)


# -- random numbers that depend on the place in the step, not on the stage that draws them ---------

_MASK = (1 << 64) - 1


def reseed(seed: int, call: int, event: int = 0) -> None:
    """Seeds the CPU and CUDA generators for the code that follows ``event`` before ``call``."""
    seed_torch(_mix(_mix(_mix(seed & _MASK) ^ call) ^ event) >> 1)


def seed_torch(seed: int) -> None:
    """torch.manual_seed for the CPU and, where CUDA is in use, for this rank's device.

    torch's own formats the stack once for each kind of accelerator that this process has not
    used: half a millisecond and more inside of a training.
    """
    torch.default_generator.manual_seed(seed)
    if cuda_is_used():
        torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Puts the generators back afterwards, so that a step does not steer the next data order."""
    cpu = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state() if cuda_is_used() else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


TorchState = tuple[Tensor, Tensor | None]  # of the generators on CPU and current device


def torch_state() -> TorchState:
    cuda = torch.cuda.get_rng_state() if cuda_is_used() else None
    return torch.default_generator.get_state(), cuda


@dataclass(frozen=True, slots=True)
class Generators:
    """Where all generators stand that a forward may draw from.

    Attributes:
        cpu: torch's on the CPU.
        cuda: The current device's; None while CUDA is not in use.
        python: That of the ``random`` module.
        numpy: numpy's global one; None while nobody has imported it.
    """

    cpu: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        numpy: Any = sys.modules.get("numpy.random")
        return cls(
            torch.default_generator.get_state(),
            torch.cuda.get_rng_state() if cuda_is_used() else None,
            random.getstate(),
            None if numpy is None else numpy.get_state(),
        )

    def are_now(self, *, host_only: bool = False) -> bool:
        """Whether nothing has been drawn since; ``host_only``: with Python and numpy."""
        now = Generators.now()
        alike = self.python == now.python and self._of_numpy() == now._of_numpy()
        if host_only:
            return alike
        arrays = [(self.cpu, now.cpu)]
        if self.cuda is not None and now.cuda is not None:
            arrays.append((self.cuda, now.cuda))
        return alike and all(torch.equal(before, after) for before, after in arrays)

    def written(self) -> list[str | None]:
        """Torch's part in letters, for other ranks."""
        parts = (self.cpu, self.cuda)
        return [None if p is None else b64encode(p.numpy().tobytes()).decode() for p in parts]

    def with_torch(self, cpu: Tensor, cuda: Tensor | None) -> Generators:
        """With another state of torch's generators."""
        return replace(self, cpu=cpu, cuda=self.cuda if cuda is None else cuda)

    @classmethod
    def read(cls, written: Sequence[str | None]) -> Generators:
        """Torch's part as ``written``, the others where they are now."""
        cpu, cuda = (
            None if p is None else torch.frombuffer(bytearray(b64decode(p)), dtype=torch.uint8)
            for p in written
        )
        assert cpu is not None
        return cls.now().with_torch(cpu, cuda)

    def marks(self) -> tuple[int, int, int]:
        """Of torch, Python and numpy: the same number on ranks that draw the same."""
        mark = zlib.crc32(self.cpu.numpy().tobytes())
        if self.cuda is not None:
            mark = zlib.crc32(self.cuda.numpy().tobytes(), mark)
        host = repr(self.python).encode(), b"".join(self._of_numpy())
        return mark, zlib.crc32(host[0]), zlib.crc32(host[1])

    def mark(self) -> int:
        """The same number on ranks whose host draws the same."""
        words = [self.cpu.numpy().tobytes(), repr(self.python).encode(), *self._of_numpy()]
        return zlib.crc32(b"".join(words))

    def _of_numpy(self) -> list[bytes]:
        # Its array in words of its own takes milliseconds, and passes are many.
        if self.numpy is None:
            return []
        return [self.numpy[1].tobytes(), repr(self.numpy[2:]).encode()]

    def put_back(self, *, host_only: bool = False) -> None:
        if not host_only:
            torch.default_generator.set_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


def own_generators(module: nn.Module) -> list[tuple[torch.Generator, Tensor]]:
    """The torch generators that a module and its parts keep as attributes, and where they stand."""
    values = [value for child in module.modules() for value in vars(child).values()]
    own = {id(value): value for value in values if isinstance(value, torch.Generator)}
    return [(generator, generator.get_state()) for generator in own.values()]


@contextlib.contextmanager
def drawing_again(states: Generators) -> Iterator[None]:
    """Inside, generators draw what they drew from ``states`` on; then they go on as before."""
    before = Generators.now()
    states.put_back()
    try:
        yield
    finally:
        before.put_back()


def cuda_is_used() -> bool:
    """Whether anything has run on CUDA here; asking does not start it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _mix(value: int) -> int:
    """SplitMix64: neighbouring numbers give unrelated seeds."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
