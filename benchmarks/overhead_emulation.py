"""Compute that only takes time: stages that sleep, the same module for every engine.

The input gradient and the weight gradient sleep in different autograd nodes, so that a backward can
be split. The weight goes through a 1 x 1 product, whose weight gradient is one that can wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

TOKENS = 8  # columns of a batch: what a pipeline takes in is small, what its stages hand on is not


@dataclass
class Emulation:
    """What each stage of a rank takes, and how long it has really taken.

    What the module itself does counts as emulated compute, so that all else is the engine's.

    Attributes:
        forward_s: F of one stage, in seconds.
        input_s: I.
        weight_s: W.
        elements: float32 numbers that a stage hands on per microbatch.
        busy_s: Time spent in F, I and W since it was set to 0.
        entered: When the running stage was entered.
    """

    forward_s: float
    input_s: float
    weight_s: float
    elements: int
    busy_s: float = 0.0
    entered: float = 0.0

    def enter(self) -> None:
        """Begins an F, I or W."""
        self.entered = time.perf_counter()

    def leave(self, duration: float) -> None:
        """Sleeps until ``duration`` has passed since it began."""
        left = self.entered + duration - time.perf_counter()
        if left > 0:
            time.sleep(left)
        now = time.perf_counter()
        self.busy_s += now - self.entered
        self.entered = now  # in a full backward, I follows W or W follows I


class _Data(Function):
    """The data path; its backward is I. New tensors as results both ways."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, anchor: Tensor | None, emulation: Emulation) -> Tensor:
        ctx.emulation = emulation
        ctx.has_anchor = anchor is not None
        return torch.zeros(data.shape[0], emulation.elements)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        data = torch.zeros_like(gradients[0]) if ctx.needs_input_grad[0] else None
        anchor = torch.zeros(1) if ctx.has_anchor else None
        ctx.emulation.leave(ctx.emulation.input_s)
        return data, anchor, None


class _Weight(Function):
    """The weight path; its backward is W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, emulation: Emulation) -> Tensor:
        ctx.emulation = emulation
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.emulation.enter()
        ctx.emulation.leave(ctx.emulation.weight_s)
        return gradients[0], None


class _Join(Function):
    """Both paths together; an addition without the work. A backward begins here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, emulation: Emulation) -> Tensor:
        ctx.emulation = emulation
        ctx.mark_dirty(hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.emulation.enter()
        return gradients[0], torch.ones(1, 1), None


class SleepingStage(nn.Module):
    """``y = join(data(x), ones @ weight(w))``: [rows, columns] to [rows, elements]."""

    ones: Tensor

    def __init__(self, emulation: Emulation, *, first: bool) -> None:
        """Makes a stage.

        Args:
            emulation: Durations, shared by all stages of a rank.
            first: The first stage's input wants no gradient; a parameter of its own does, or
                autograd would leave out its I.
        """
        super().__init__()
        self._emulation = emulation
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.anchor = nn.Parameter(torch.zeros(1)) if first else None
        self.register_buffer("ones", torch.ones(1, 1))

    def forward(self, data: Tensor) -> Tensor:
        """Sleeps for F."""
        emulation = self._emulation
        emulation.enter()
        hidden = _Data.apply(data, self.anchor, emulation)  # type: ignore[no-untyped-call]
        weight = _Weight.apply(self.weight, emulation)  # type: ignore[no-untyped-call]
        product = torch.mm(self.ones, weight)
        result: Tensor = _Join.apply(hidden, product, emulation)  # type: ignore[no-untyped-call]
        emulation.leave(emulation.forward_s)
        return result


def loss_of(output: Tensor, target: Tensor | None = None) -> Tensor:
    """A scalar that takes next to no time; the target plays no part."""
    return output[0, 0].clone()
