"""A run of a step without its layers, which notes what the step does."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strategies.models.nested import leaves, tensors
from strategies.models.replay.gate import StageDone
from strategies.models.replay.hole import Args, Function, Kwargs, dataless, operation_name
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Position
from strategies.models.replay.rows.batch_rows import same_values
from strategies.models.replay.shape_mode import ShapeMode
from strategies.models.state import kept_generators


@dataclass(slots=True)
class DryTrace:
    """What one run has seen.

    Attributes:
        trail: The layers, by index, and the operations on values of theirs, in order.
        wiring: Of the same, and of what is returned: by which of them its values were made.
        others: Names of what else is done: to values without a layer's part, behind the last layer,
            and layers that run without gradients.
        given: By position and place, what calls and operations get that no layer has a part in.
        failed: What the step raised.
        returned: Whether the step came to its return.
    """

    trail: list[int | str] = field(default_factory=list)
    wiring: list[tuple[int, ...]] = field(default_factory=list)
    others: set[str] = field(default_factory=set)
    given: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    failed: Exception | None = None
    returned: bool = False

    def differs(self, other: DryTrace, *, up_to: Position) -> bool:
        """Whether another run's layers and operations get other values, up to a position."""
        return any(
            point[:2] <= up_to and not _is_same(other.given.get(point), value)
            for point, value in self.given.items()
        )


class DryRun(ShapeMode):
    """Goes through a step without its layers; ends where a value of a layer would be looked at.

    ``notes``: keeps what calls and operations are given.
    """

    def __init__(
        self,
        units: list[nn.Module],
        device: torch.device,
        cache: MutableMapping[Hashable, Outcome],
        *,
        notes: bool = False,
    ) -> None:
        super().__init__(units, device, cache)
        self.trace = DryTrace()
        self._notes = notes
        self._position: Position = (0, 0)
        self._apart = False
        self._makers: dict[int, int] = {}  # by a value's identity, which of the trail made it
        self._alive: list[Tensor] = []  # or an identity would be another value's

    @contextmanager
    def metric(self) -> Any:
        """Inside, a metric resamples rows or counts them, of which nothing comes back to layers."""
        before, self._apart = self._apart, True
        try:
            with kept_generators():
                yield
        finally:
            self._apart = before

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        self._note(args, kwargs)
        self.trace.trail.append(index)
        self.trace.wiring.append(self._makers_of((args, kwargs)))
        if not torch.is_grad_enabled():
            self.trace.others.add(f"{index} without gradients")
        call = self._position[0]
        with kept_generators():
            result, _ = self.skip(index, forward, args, kwargs, call)
        self._made(result)
        self._position = (call + 1, 0)
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        known, answer = dataless(func, args, kwargs)
        if known:
            return answer
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            raise StageDone
        self._note(args, kwargs)
        with kept_generators():
            outcome = self.answer(func, args, kwargs)
        if outcome.dependent:
            raise StageDone  # Somebody wants to see a value of a layer.
        result = self.instantiate(outcome, None, args, kwargs)
        name = operation_name(func)
        if name == "__setitem__" or tensors(result):
            call, event = self._position
            self.trace.trail.append(name)
            self.trace.wiring.append(self._makers_of((args, kwargs)))
            self._made(result)
            self._position = (call, event + 1)
        return result

    def on_return(self, result: Any) -> None:
        """Behind the step."""
        self.trace.returned = True
        self.trace.wiring.append(self._makers_of(result))

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._inside is None and not self._apart:
            self.trace.others.add(operation_name(func))
        return func(*args, **kwargs)

    def _makers_of(self, value: Any) -> tuple[int, ...]:
        return tuple(self._makers.get(id(leaf), -1) for leaf in tensors(value))

    def _made(self, result: Any) -> None:
        number = len(self.trace.trail)
        for tensor in tensors(result):
            self._makers[id(tensor)] = number
            self._alive.append(tensor)

    def _note(self, args: Args, kwargs: Kwargs) -> None:
        if not self._notes or self._apart:
            return
        for place, leaf in enumerate(leaves((args, kwargs))):
            real = isinstance(leaf, Tensor) and not self.tracked(leaf) and not leaf.is_meta
            if real and leaf.layout == torch.strided:
                self.trace.given[*self._position, place] = leaf.detach().clone()


def _is_same(first: Tensor | None, second: Tensor) -> bool:
    return first is not None and first.shape == second.shape and same_values(first, second)
