"""Random numbers that depend on the place in the step, not on the stage that draws them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_MASK = (1 << 64) - 1


def reseed(seed: int, call: int, event: int = 0) -> None:
    """Seeds the CPU and CUDA generators for the code that follows ``event`` before ``call``."""
    value = _mix(_mix(_mix(seed & _MASK) ^ call) ^ event) >> 1
    # torch.manual_seed looks for every kind of accelerator and costs 100 microseconds.
    torch.default_generator.manual_seed(value)
    if _cuda_is_used():
        torch.cuda.manual_seed(value)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Puts the generators back afterwards, so that a step does not steer the next data order."""
    cpu = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state() if _cuda_is_used() else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def _cuda_is_used() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _mix(value: int) -> int:
    """SplitMix64: neighbouring numbers give unrelated seeds."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
