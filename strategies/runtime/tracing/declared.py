"""Figures of a module that declares its units: each runs on what the one before has made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strategies.runtime.logs import captured_logs
from strategies.runtime.replay.hole import Spec
from strategies.runtime.tracing.figures import Figures, Slot, Tracer
from strategies.runtime.tracing.grouped import ModelFigures, UnitFigures
from strategies.runtime.unit_model import HasUnits


def trace_declared(module: nn.Module, batch: Any, tracer: Tracer) -> ModelFigures:
    """All units on one microbatch; the last one's figures include the loss.

    Args:
        module: It has ``pipeline_units()``.
        batch: One microbatch.
        tracer: Knows what was traced before.

    Raises:
        ModelError: A unit cannot be traced.
    """
    assert isinstance(module, HasUnits)
    units: list[UnitFigures] = []
    tensors: list[tuple[int, tuple[int, ...], int]] = []
    args: tuple[Any, ...] = module.pipeline_inputs(batch)
    keys: tuple[Any, ...] = ()
    declared = module.pipeline_units()
    for index, (name, unit) in enumerate(declared):
        found = UnitFigures(name)
        figures = tracer.layer(name, unit, args, {})
        names = (f"{name}.{own}" for own, _ in unit.named_parameters())
        found.parameters = dict.fromkeys(names)
        before = {key: slot for key, slot in zip(keys, args, strict=True)} if keys else {}
        args, keys = _handed(figures, index)
        found.add(figures, call=index, inputs=tuple(before), outputs=keys)
        units.append(found)
        if index + 1 < len(declared):
            size = sum(spec.num_bytes for spec in figures.outputs)
            tensors.append((index, (index + 1,), size))
    last = units[-1]

    def result(*outputs: Tensor) -> Any:
        with captured_logs(module):
            return module.pipeline_result(outputs, batch, 0, "train")

    figures = tracer.operation("pipeline_result()", result, args, {})
    last.add(figures, call="result", inputs=keys, outputs=())
    return ModelFigures(tuple(units), tuple(tensors))


def _handed(figures: Figures, index: int) -> tuple[tuple[Slot, ...], tuple[Any, ...]]:
    """What the next unit is given, and the keys of it."""
    keys = tuple(("edge", index, number) for number in range(len(figures.outputs)))
    return tuple(map(_slot, figures.outputs, keys)), keys


def _slot(spec: Spec, key: Any) -> Slot:
    grad = spec.requires_grad and (spec.dtype.is_floating_point or spec.dtype.is_complex)
    return Slot(Spec(spec.shape, spec.stride, spec.dtype, torch.device("cpu"), grad), key)
