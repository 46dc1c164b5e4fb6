"""Versions of a stage's weights, kept for microbatches that are still on their way back.

A program without a flush updates weights while graphs of older ones wait for their backwards. Each
version lies in memory of its own, which nobody writes as long as such a graph is there; the
parameters point to the newest one, and to that of a microbatch while its backward runs. Autograd
saves a parameter itself or a view of it: the first reads what the parameter points to when the
backward runs, the second what it pointed to in the forward. Both are then the same memory.

An update first moves the parameters to memory that no graph needs, with a copy of their values; it
writes where it is if there is no such graph. Nothing else that reads or writes weights has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, Kind
from strategies.runtime.update.main_weights import AllMainWeights


@dataclass
class _Stage:
    parameters: tuple[nn.Parameter, ...]
    # Microbatch -> the memory that its forward has read, a tensor per parameter.
    read: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    spare: list[tuple[Tensor, ...]] = field(default_factory=list)

    def point_to(self, version: tuple[Tensor, ...]) -> None:
        for parameter, values in zip(self.parameters, version, strict=True):
            parameter.data = values

    def needed(self, version: tuple[Tensor, ...]) -> bool:
        return any(other is version for other in self.read.values())


class WeightVersions:
    """The weights of one rank's stages; a weight of several of them belongs to the first.

    ``mains`` is what an optimizer updates in their place, if anything.
    """

    def __init__(self, stages: Mapping[int, Iterable[nn.Parameter]], mains: AllMainWeights) -> None:
        self._mains = mains
        seen: set[int] = set()
        self._stages: dict[int, _Stage] = {}
        for stage, parameters in stages.items():
            own = tuple(p for p in parameters if id(p) not in seen)
            seen.update(map(id, own))
            self._stages[stage] = _Stage(own)
        self._newest = {stage: _memory(held) for stage, held in self._stages.items()}
        self.most = 1  # versions of a stage of which there has been memory at once

    def read_by(self, item: Instruction) -> AbstractContextManager[None]:
        """Around F, B or R: a forward reads the newest weights, the others what it has read."""
        assert item.microbatch is not None
        held = self._stages[item.stage]
        newest = self._newest[item.stage]
        if item.kind is Kind.F:
            held.read[item.microbatch] = newest
            return nullcontext()
        version = held.read[item.microbatch]
        if item.kind in GRADIENT_KINDS:
            return self._read_last(item.stage, item.microbatch, version)
        return nullcontext() if version is newest else self._shown(held, version, newest)

    @contextmanager
    def _shown(
        self, held: _Stage, version: tuple[Tensor, ...], newest: tuple[Tensor, ...]
    ) -> Iterator[None]:
        held.point_to(version)
        try:
            yield
        finally:
            held.point_to(newest)

    @contextmanager
    def _read_last(
        self, stage: int, microbatch: int, version: tuple[Tensor, ...]
    ) -> Iterator[None]:
        held, newest = self._stages[stage], self._newest[stage]
        with nullcontext() if version is newest else self._shown(held, version, newest):
            yield
        del held.read[microbatch]
        if version is not newest and not held.needed(version):
            held.spare.append(version)

    def make_room(self) -> dict[int, Tensor]:
        """Right before weights are updated: what is written is memory that no graph needs.

        Returns:
            By identity of a parameter, its values where they stay as they are.
        """
        left: dict[int, Tensor] = {}
        for stage, held in self._stages.items():
            newest = self._newest[stage]
            if held.parameters and held.needed(newest):
                room = self._mains.room
                free = held.spare.pop() if held.spare else room(held.parameters, stage)
                for target, values in zip(free, newest, strict=True):
                    target.copy_(values)
                self._newest[stage] = free
                alive = {id(version) for version in (*held.read.values(), *held.spare, free)}
                self.most = max(self.most, len(alive))
                held.point_to(free)
                self._mains.follow(held.parameters, stage)
                left |= {id(p): old for p, old in zip(held.parameters, newest, strict=True)}
        return left

    @contextmanager
    def updated(self) -> Iterator[None]:
        """Around an optimizer's step, which makes room before it writes.

        Autograd counts how often a tensor was written, per parameter and not per memory; here the
        count stays, as graphs that it is compared with read other memory.
        """
        parameters = tuple(p for held in self._stages.values() for p in held.parameters)
        with _unsafe_preserve_version_counter(parameters):
            yield

    def settle(self) -> None:
        """Nothing is under way: only the newest version stays, where the parameters are now."""
        for stage, held in self._stages.items():
            assert not held.read
            held.spare.clear()
            self._newest[stage] = _memory(held)


def _memory(held: _Stage) -> tuple[Tensor, ...]:
    return tuple(parameter.detach() for parameter in held.parameters)


# ---------------------------------------------------------------------------------- error feedback
# An optimizer that gets the gradient of the weights before, W(n - 1), makes another update u(n)
# than it would make at W(n). How far off that was shows one step later, when the update at W(n) is
# there: u(n + 1) would have been the right one for step n. That error is fed back,
#
#     W(n + 1) = W(n) + u(n) + share * (u(n) - u(n - 1))
#
# which with a share of 1 is also where the line through the last two updates leads. It looks at
# what an optimizer does and not at gradients, so any will do; momentum, weight decay and learning
# rate are part of u. After Zmushko et al., 2026, https://arxiv.org/abs/2606.30634: a difference of
# the last two updates, for which one copy of the model is kept.
#
# The first update behind an empty pipeline is not late, so in the second there is nothing to feed
# back. What the last one before a drain was off by is left as it is: checkpoints stay plain.


class ErrorFeedback:
    """What one rank keeps from update to update.

    Args:
        share: Of the difference, in (0, 1].
        parameters: What the optimizer updates.
    """

    def __init__(self, share: float, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._share = share
        self._parameters = parameters
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        # By identity of a parameter, the update before, if its gradient was late.
        self._last: dict[int, Tensor] = {}

    def begin(self, left: Mapping[int, Tensor]) -> None:
        """Right before an optimizer's step; ``left`` as ``WeightVersions.make_room`` returns it."""
        self._before = []
        for parameter in self._parameters():
            if parameter.requires_grad:
                values = left.get(id(parameter))
                kept = parameter.detach().clone() if values is None else values
                self._before.append((parameter, kept))

    @torch.no_grad()
    def end(self, *, late: bool) -> None:
        """Behind it: adds the correction, and keeps the update if its gradient was ``late``."""
        before, self._before = self._before, []
        for parameter, values in before:
            update = parameter.detach() - values
            last = self._last.get(id(parameter))
            if last is not None:
                parameter.add_(update - last, alpha=self._share)
            if late:
                self._last[id(parameter)] = update

    def forget(self) -> None:
        """The update is left out, or nothing is under way: the next one has nothing to correct."""
        self._before.clear()
        self._last.clear()
