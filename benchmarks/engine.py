"""What benchmarks measure, an engine, and the loops in which a rank measures it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


class Engine(Protocol):
    """One contender on one rank. All calls are collective."""

    def setup(self) -> None:
        """Builds it."""

    def step(self) -> None:
        """Runs one step; returns when this rank is through its list."""

    def close(self) -> None:
        """Ends everything in flight."""
        return None


@contextmanager
def ready(*engines: Engine) -> Iterator[None]:
    """Sets engines up, and closes them after the block, when all ranks are through it."""
    for engine in engines:
        engine.setup()
    dist.barrier()
    yield
    dist.barrier()
    for engine in engines:
        engine.close()


def in_turns(
    engines: Mapping[str, Engine],
    measure: Callable[[str], Result],
    *,
    warmups: int,
    repetitions: int,
) -> dict[str, list[Result]]:
    """Measures every engine by its name once per repetition, so that noise hits all alike.

    Each repetition has an order of its own, the same on all ranks: no engine always follows the
    same one.
    """
    found: dict[str, list[Result]] = {name: [] for name in engines}
    order, turns = random.Random(0), list(engines)
    for repetition in range(warmups + repetitions):
        order.shuffle(turns)
        for name in turns:
            result = measure(name)
            if repetition >= warmups:
                found[name].append(result)
    return found


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a step that all ranks begin together: the slowest rank's, and CPU of all ranks."""
    dist.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    step()
    slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    together = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(together)
    return float(slowest), float(together)


def steady(
    engine: Engine, *, warmups: int, steps: int, after: Callable[[int], None] | None = None
) -> list[float]:
    """Clock at the end of the last warm-up step and of each later one, with nothing in between.

    Args:
        engine: It is ready.
        warmups: At least 1.
        steps: That count.
        after: Called after each step, warm-ups included, with its number.
    """
    ended = []
    for step in range(warmups + steps):
        engine.step()
        ended.append(time.perf_counter())
        if after is not None:
            after(step)
    return ended[warmups - 1 :]
