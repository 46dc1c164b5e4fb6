"""What a step touches besides its graph and its module: numbers for the host, random generators."""

from __future__ import annotations

import contextlib
import random
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


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


def seed_all(seed: int) -> None:
    """All generators, without a word to Lightning."""
    seed_torch(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)


TorchState = tuple[Tensor, Tensor | None]  # of the generators on CPU and current device


def torch_state() -> TorchState:
    cuda = torch.cuda.get_rng_state() if cuda_is_used() else None
    return torch.default_generator.get_state(), cuda


def set_torch_state(state: TorchState) -> None:
    cpu, cuda = state
    torch.default_generator.set_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Puts the generators back afterwards, so that a step does not steer the next data order."""
    state = torch_state()
    try:
        yield
    finally:
        set_torch_state(state)


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

    def written(self, *, host: bool) -> list[Any]:
        """JSON-ready, for other ranks; ``host``: with Python and numpy."""
        parts = [None if p is None else encoded(p) for p in (self.cpu, self.cuda)]
        if not host:
            return [*parts, None, None]
        numpy = self.numpy and [self.numpy[0], self.numpy[1].tolist(), *self.numpy[2:]]
        return [*parts, self.python, numpy]

    def with_torch(self, cpu: Tensor, cuda: Tensor | None) -> Generators:
        """With another state of torch's generators."""
        return replace(self, cpu=cpu, cuda=self.cuda if cuda is None else cuda)

    @classmethod
    def read(cls, written: Sequence[Any]) -> Generators:
        """As ``written``; what that lacks is where it is now."""
        cpu, cuda, python, numpy = written
        found = cls.now().with_torch(decoded(cpu), None if cuda is None else decoded(cuda))
        if python is not None:
            found = replace(found, python=(python[0], tuple(python[1]), python[2]))
        if numpy is None or found.numpy is None:
            return found
        keys = found.numpy[1].copy()
        keys[:] = numpy[1]
        return replace(found, numpy=(numpy[0], keys, *numpy[2:]))

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
            set_torch_state((self.cpu, self.cuda))
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


def encoded(state: Tensor) -> str:
    """A generator's state in letters."""
    return b64encode(state.numpy().tobytes()).decode()


def decoded(letters: str) -> Tensor:
    return torch.frombuffer(bytearray(b64decode(letters)), dtype=torch.uint8)


def own_generators(module: nn.Module) -> list[tuple[torch.Generator, Tensor]]:
    """The torch generators that a module and its parts keep as attributes, and where they stand."""
    values = [value for child in module.modules() for value in vars(child).values()]
    own = {id(value): value for value in values if isinstance(value, torch.Generator)}
    return [(generator, generator.get_state()) for generator in own.values()]


def is_generator(value: Any) -> bool:
    """Whether numbers are drawn from it: one of NumPy's or Python's own objects for that."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy: Any = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState)


def generator_words(value: Any) -> str:
    """Where such an object stands."""
    if isinstance(value, random.Random):
        return repr(value.getstate())
    numpy: Any = sys.modules["numpy.random"]
    own = value.bit_generator.state if isinstance(value, numpy.Generator) else value.get_state()
    return repr(own)


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
