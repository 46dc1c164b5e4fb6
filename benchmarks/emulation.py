"""Compute that only takes time: stages that sleep, the same modules for every engine.

What is sent and reduced is really there. ``SleepingStage`` has its input gradient and its weight
gradient in different autograd nodes, so that a backward can be split; the weight goes through a
1 x 1 product, whose weight gradient is one that can wait. ``LayeredStage`` is a row of layers: a
layer's gradient is there when its share of the backward has passed, so that buckets get ready one
after the other as in a real model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from strategies.models.stage_model import Mode, StageModel, StageOutput, Unit

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

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    def enter(self) -> None:
        """Begins an F, I or W."""
        self.entered = time.perf_counter()

    def reach(self, offset_s: float) -> None:
        """Sleeps until then after its beginning: what sleeps overrun does not add up."""
        left = self.entered + offset_s - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def leave(self, duration_s: float) -> None:
        """Sleeps until ``duration_s`` has passed since it began."""
        self.reach(duration_s)
        now = time.perf_counter()
        self.busy_s += now - self.entered
        self.entered = now  # in a full backward, I follows W or W follows I


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank is to run: a schedule on sleeping stages."""

    schedule: str
    num_microbatches: int
    emulation: Emulation

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    @property
    def batch(self) -> Tensor:
        return torch.zeros(self.num_microbatches, TOKENS)


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
    """``y = join(data(x), ones @ weight(w))``: [rows, columns] to [rows, elements].

    The first stage's input wants no gradient; a parameter of its own does, or autograd would leave
    out its I.
    """

    ones: Tensor

    def __init__(self, emulation: Emulation, *, first: bool) -> None:
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


class _Body(Function):
    """The data path of layers; hands a gradient back where one is wanted."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, emulation: Emulation) -> Tensor:
        ctx.shape = data.shape
        return torch.zeros(data.shape[0], emulation.elements)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return (torch.zeros(ctx.shape) if ctx.needs_input_grad[0] else None), None


class _Layer(Function):
    """One layer's share of the backward, and its weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, emulation: Emulation, share: float
    ) -> Tensor:
        ctx.emulation, ctx.share, ctx.size = emulation, share, weight.shape[0]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        emulation, share = ctx.emulation, ctx.share
        (emulation.leave if share == 1.0 else emulation.reach)(share * emulation.backward_s)
        return gradients[0], torch.ones(1).expand(ctx.size), None, None


class _Begin(Function):
    """Where a backward of layers begins."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, emulation: Emulation) -> Tensor:
        ctx.emulation = emulation
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.emulation.enter()
        return gradients[0], None


class LayeredStage(nn.Module):
    """[rows, columns] to [rows, elements]; F sleeps at once, B layer by layer."""

    def __init__(self, emulation: Emulation, *, layers: int, layer_elements: int) -> None:
        super().__init__()
        self._emulation = emulation
        self.weights = nn.ParameterList(torch.zeros(layer_elements) for _ in range(layers))

    def forward(self, data: Tensor) -> Tensor:
        """Sleeps for F."""
        emulation = self._emulation
        emulation.enter()
        hidden: Tensor = _Body.apply(data, emulation)  # type: ignore[no-untyped-call]
        count = len(self.weights)
        for layer, weight in enumerate(self.weights):
            # Backward goes from the last layer to the first.
            share = (count - layer) / count
            hidden = _Layer.apply(hidden, weight, emulation, share)  # type: ignore[no-untyped-call]
        result: Tensor = _Begin.apply(hidden, emulation)  # type: ignore[no-untyped-call]
        emulation.leave(emulation.forward_s)
        return result


def loss_of(output: Tensor, target: Tensor | None = None) -> Tensor:
    """A scalar that takes next to no time; the target plays no part."""
    return output[0, 0].clone()


class EmulatedModel(StageModel):
    """One unit per stage; ``make`` makes a stage, of which only this rank's exist."""

    def __init__(self, num_stages: int, make: Callable[[int], nn.Module]) -> None:
        self._units = tuple(Unit(f"stages.{stage}", 1.0) for stage in range(num_stages))
        self._make = make
        self._stages: dict[int, nn.Module] = {}

    @property
    def module(self) -> nn.Module:
        return nn.ModuleList(self._stages.values())

    @property
    def units(self) -> tuple[Unit, ...]:
        return self._units

    def cut(self, stages: Sequence[range], owned: Sequence[int]) -> None:
        self._stages = {stage: self._make(stage) for stage in owned}

    def forward(
        self,
        stage: int,
        inputs: tuple[Tensor, ...],
        *,
        batch: Any,
        batch_idx: int,
        microbatch: int,
        mode: Mode,
        seed: int | None,
        dataloader_idx: int | None = None,
        at_end: Any = None,
        recording: Any = None,
    ) -> StageOutput:
        output = self._stages[stage](*(inputs or (batch,)))
        if stage == len(self._units) - 1:
            return StageOutput(loss=loss_of(output))
        return StageOutput((output,))

    def stage_parameters(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        return _named(stage, self._stages[stage])

    def shared_parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ()

    @property
    def parameter_names(self) -> tuple[str, ...]:
        with torch.device("meta"):
            stages = [self._make(stage) for stage in range(len(self._units))]
        return tuple(name for stage, each in enumerate(stages) for name, _ in _named(stage, each))


def _named(stage: int, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        yield f"stages.{stage}.{name}", parameter


def sleeping_model(num_stages: int, emulation: Emulation) -> EmulatedModel:
    return EmulatedModel(num_stages, lambda stage: SleepingStage(emulation, first=stage == 0))
