"""A run of a step without its layers, which notes what is made without them."""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strategies.models.collectives import is_collective
from strategies.models.nested import leaves, tensors
from strategies.models.replay.gate import STEP_FRAME, StageDone
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    checkpoint_region,
    dataless,
    operation_name,
    user_line,
)
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Position
from strategies.models.replay.rows.packed_rows import counts_of, packs, places_rows
from strategies.models.replay.rows.value_plan import (
    Draw,
    Given,
    Point,
    ValuePlan,
    Values,
    bounds_of,
)
from strategies.models.replay.shape_mode import ShapeMode
from strategies.models.state import Generators, kept_generators, seed_torch

_INDEXING = """
    __getitem__ __setitem__ index_select gather take_along_dim index_add index_add_ index_copy
    index_copy_ index_put index_put_ index_fill scatter scatter_ scatter_add scatter_add_
    scatter_reduce take
"""
_INDEXES = frozenset(_INDEXING.split())
_FILLING = frozenset({"__setitem__", "copy_", "zero_", "fill_"})
_NEUTRAL = 0.5


class ValueRun(ShapeMode):
    """Goes through a step without its layers and notes what is made without them.

    Without a ``plan`` it notes everything; it ends where a value of a layer would be looked at.
    If it is ``neutral``, what is drawn is the same for each row, which leaves rows where they are.
    """

    def __init__(
        self,
        units: list[nn.Module],
        device: torch.device,
        cache: MutableMapping[Hashable, Outcome],
        plan: ValuePlan | None = None,
        *,
        neutral: bool = False,
        given: Given | None = None,
    ) -> None:
        super().__init__(units, device, cache)
        self.values = Values()
        self._plan = plan
        self._neutral = neutral
        self._given = given
        self._position: Position = (0, 0)
        self._apart = False
        self._makers: dict[int, int] = {}  # by a value's identity, which of the trail made it
        self._alive: list[Tensor] = []  # or an identity would be another value's

    @contextmanager
    def metric(self) -> Iterator[None]:
        """Inside, a metric resamples rows or counts them, of which nothing comes back to layers."""
        before, self._apart = self._apart, True
        try:
            with kept_generators():
                yield
        finally:
            self._apart = before

    def begin(self) -> None:
        self._before = Generators.now() if self._plan is None else None
        self._leave_if_through()

    def close(self) -> Values:
        """What it has seen; its generators are wherever the step has left them."""
        if self._before is not None:
            self.values.host = not self._before.are_now(host_only=True)
            self.values.moved = not self._before.are_now()
        self._twins.clear()
        return self.values

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        self._note(args, kwargs)
        self.values.trail.append(index)
        self.values.wiring.append(self._makers_of((args, kwargs)))
        if not torch.is_grad_enabled():
            self.values.others.add(f"{index} without gradients")
        call = self._position[0]
        with kept_generators():
            result, _ = self.skip(index, forward, args, kwargs, call)
        self._made(result)
        self._arrive((call + 1, 0))
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        known, answer = dataless(func, args, kwargs)
        if known:
            return answer
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            return self.on_backward(func)
        points = self._note(args, kwargs)
        with kept_generators():
            outcome = self.answer(func, args, kwargs)
        if outcome.dependent:
            return self.on_look(func, args)
        if self._plan is None:
            given = [points.get(place) for place in range(len(list(leaves((args, kwargs)))))]
            if operation_name(func) in _INDEXES:
                at = self.values.at
                found = {point for point in points.values() if not at[point].is_floating_point()}
                self.values.indices |= found
            over = operation_name(func) in _FILLING or is_collective(func)
            written = (given[index] for index, _ in outcome.mutated)
            changed = self.values.filled if over else self.values.written
            changed.update(point for point in written if point is not None)
        result = self.instantiate(outcome, None, args, kwargs)
        name = operation_name(func)
        if name == "__setitem__" or tensors(result):
            call, event = self._position
            self.values.trail.append(name)
            self.values.wiring.append(self._makers_of((args, kwargs)))
            self._made(result)
            self._arrive((call, event + 1))
        return result

    def on_return(self, result: Any) -> None:
        """Behind the step."""
        self.values.returned = True
        self.values.wiring.append(self._makers_of(result))

    def _makers_of(self, value: Any) -> tuple[int, ...]:
        return tuple(self._makers.get(id(leaf), -1) for leaf in tensors(value))

    def _made(self, result: Any) -> None:
        number = len(self.values.trail)
        for tensor in tensors(result):
            self._makers[id(tensor)] = number
            self._alive.append(tensor)

    def on_look(self, func: Function, args: Args) -> Any:
        """Somebody wants to see a value of a layer."""
        raise StageDone

    def on_backward(self, func: Function) -> Any:
        raise StageDone

    def on_packing(self, counts: Tensor) -> None:
        super().on_packing(counts)
        self.values.longest.append(len(counts))

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if packs(func):
            result = func(*args, **kwargs)
            self.on_packing(result[1])
            return result
        if self._inside is not None or self._apart:
            return func(*args, **kwargs)
        self.values.others.add(operation_name(func))
        if self._plan is not None:
            result = func(*args, **kwargs)
            if func in self._plan.drawing:
                self.values.draws.append(Draw(func, _copy(result), bounds_of(args, kwargs)))
            return result
        before = _drawn_so_far()
        result = func(*args, **kwargs)
        if kwargs.get("generator") is not None or not _same_states(before, _drawn_so_far()):
            if self._given is not None:
                self._given.put_into(result, func, bounds_of(args, kwargs))
            self.values.draws.append(Draw(func, _copy(result), bounds_of(args, kwargs)))
            if self._neutral and isinstance(result, Tensor):
                _make_neutral(func, result)
        return result

    def _note(self, args: Args, kwargs: Kwargs) -> dict[int, Point]:
        """Keeps the untracked tensors among the arguments, where they are of interest."""
        wanted = None if self._plan is None else self._plan.ways.get(self._position, {})
        points: dict[int, Point] = {}
        if self._apart or (wanted is not None and not wanted):
            return points
        if places_rows():
            return points
        region = None
        if self._plan is None:
            region, _ = checkpoint_region(STEP_FRAME)
        counts = counts_of((args, kwargs))
        for place, leaf in enumerate(leaves((args, kwargs))):
            if not isinstance(leaf, Tensor) or self.tracked(leaf) or leaf.is_meta:
                continue
            if leaf.layout != torch.strided:
                continue  # A graph's edges, say, which have no rows of the batch.
            if id(leaf) in counts:
                continue
            if wanted is not None and place not in wanted:
                continue
            point = (*self._position, place)
            points[place] = point
            self.values.at[point] = leaf.detach().clone()
            if self._plan is None:
                self.values.lines[point] = user_line()
                if region is not None:
                    self.values.regions.add(point)
        return points

    def _arrive(self, position: Position) -> None:
        self._position = self.values.end = position
        self._leave_if_through()

    def _leave_if_through(self) -> None:
        if self._plan is not None and self._position > self._plan.last:
            raise StageDone


def _make_neutral(func: Function, result: Tensor) -> None:
    with torch.no_grad():
        if func is torch.randperm:
            result.copy_(torch.arange(len(result)))
        else:
            result.fill_(_NEUTRAL if result.is_floating_point() else 0)


def seed_all(seed: int) -> None:
    """All generators, without a word to Lightning."""
    seed_torch(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)


def _drawn_so_far() -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def _same_states(before: list[Tensor], now: list[Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(before, now, strict=False))


def _copy(result: Any) -> Any:
    return (
        result.detach().clone()
        if isinstance(result, Tensor) and not isinstance(result, Hole)
        else result
    )
