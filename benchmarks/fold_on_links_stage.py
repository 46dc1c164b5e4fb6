"""Emulated stages with real gradients: compute sleeps, what is sent and reduced is there.

A stage is a row of layers. Its backward takes equally long in each, and a layer's gradient is there
when its share has passed, so that buckets get ready one after the other as in a real model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.emulation import loss_of
from strategies.models.stage_model import Mode, StageModel, StageOutput, Unit


@dataclass
class Emulation:
    """What each stage of a rank takes, and how long it has really taken.

    Attributes:
        forward_s: F of one stage, in seconds.
        backward_s: B.
        elements: float32 numbers that a stage hands on per microbatch.
        busy_s: Time spent in F and B since it was set to 0.
        begun: When the running F or B began.
    """

    forward_s: float
    backward_s: float
    elements: int
    busy_s: float = 0.0
    begun: float = 0.0

    def begin(self) -> None:
        """Begins an F or B."""
        self.begun = time.perf_counter()

    def reach(self, offset_s: float) -> None:
        """Sleeps until then after its beginning: what sleeps overrun does not add up."""
        left = self.begun + offset_s - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def end(self) -> None:
        """Counts what it has taken."""
        self.busy_s += time.perf_counter() - self.begun


class _Body(Function):
    """The data path; hands a gradient back where one is wanted."""

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
        ctx.emulation.reach(ctx.share * ctx.emulation.backward_s)
        if ctx.share == 1.0:
            ctx.emulation.end()
        return gradients[0], torch.ones(1).expand(ctx.size), None, None


class _Begin(Function):
    """Where a backward begins."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, emulation: Emulation) -> Tensor:
        ctx.emulation = emulation
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.emulation.begin()
        return gradients[0], None


class LayeredStage(nn.Module):
    """[rows, columns] to [rows, elements]; F sleeps at once, B layer by layer."""

    def __init__(self, emulation: Emulation, *, layers: int, layer_elements: int) -> None:
        """Makes a stage.

        Args:
            emulation: Durations of the stage.
            layers: Number of layers.
            layer_elements: Parameters of each.
        """
        super().__init__()
        self._emulation = emulation
        self.weights = nn.ParameterList(torch.zeros(layer_elements) for _ in range(layers))

    def forward(self, data: Tensor) -> Tensor:
        """Sleeps for F."""
        emulation = self._emulation
        emulation.begin()
        hidden: Tensor = _Body.apply(data, emulation)  # type: ignore[no-untyped-call]
        count = len(self.weights)
        for layer, weight in enumerate(self.weights):
            # Backward goes from the last layer to the first.
            share = (count - layer) / count
            hidden = _Layer.apply(hidden, weight, emulation, share)  # type: ignore[no-untyped-call]
        result: Tensor = _Begin.apply(hidden, emulation)  # type: ignore[no-untyped-call]
        emulation.reach(emulation.forward_s)
        emulation.end()
        return result


class LayeredModel(StageModel):
    """One unit per stage; only this rank's stages exist."""

    def __init__(
        self, num_stages: int, emulation: Emulation, *, layers: int, layer_elements: int
    ) -> None:
        self._units = tuple(Unit(f"stages.{stage}", 1.0) for stage in range(num_stages))
        self._emulation = emulation
        self._layers = layers
        self._layer_elements = layer_elements
        self._stages: dict[int, LayeredStage] = {}

    @property
    def module(self) -> nn.Module:
        return nn.ModuleList(self._stages.values())

    @property
    def units(self) -> tuple[Unit, ...]:
        return self._units

    def cut(self, stages: Sequence[range], owned: Sequence[int]) -> None:
        self._stages = {
            stage: LayeredStage(
                self._emulation, layers=self._layers, layer_elements=self._layer_elements
            )
            for stage in owned
        }

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
    ) -> StageOutput:
        output = self._stages[stage](*(inputs or (batch,)))
        if stage == len(self._units) - 1:
            return StageOutput(loss=loss_of(output))
        return StageOutput((output,))

    def stage_parameters(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._stages[stage].named_parameters():
            yield f"stages.{stage}.{name}", parameter

    def shared_parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ()

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(
            f"{unit.name}.weights.{layer}" for unit in self._units for layer in range(self._layers)
        )
