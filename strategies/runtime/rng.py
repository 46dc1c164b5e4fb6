"""Random numbers that depend on the place in the step, not on the stage that draws them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def reseed(seed: int, call: int, event: int = 0) -> None:
    """Seeds the CPU and CUDA generators for the code that follows ``event`` before ``call``."""
    value = _mix(_mix(_mix(seed & _MASK) ^ call) ^ event) >> 1
    # torch.manual_seed looks for every kind of accelerator and costs 100 microseconds.
    torch.default_generator.manual_seed(value)
    if cuda_is_used():
        torch.cuda.manual_seed(value)


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
        """Their present states."""
        numpy: Any = sys.modules.get("numpy.random")
        return cls(
            torch.default_generator.get_state(),
            torch.cuda.get_rng_state() if cuda_is_used() else None,
            random.getstate(),
            None if numpy is None else numpy.get_state(),
        )

    def put_back(self) -> None:
        """Lets all of them draw again what they drew from here on."""
        torch.default_generator.set_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


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
