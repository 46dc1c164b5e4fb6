"""What the units of a model cost, whichever kind of model it is. Torch-free."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launcher.workloads.hf.shape import HfShape
from launcher.workloads.transformer_shape import TransformerShape, UnitSpec, unit_specs

ModelShape = TransformerShape | HfShape


def model_units(shape: ModelShape) -> tuple[UnitSpec, ...]:
    """The units in execution order; the first is the embedding, the last the head."""
    return shape.unit_specs() if isinstance(shape, HfShape) else unit_specs(shape)


def model_costs(shape: ModelShape) -> tuple[float, ...]:
    """Relative forward cost of each unit, > 0; see ``transformer_shape.unit_costs``."""
    return tuple(float(max(u.forward_flops, u.output_elements)) for u in model_units(shape))


def described(shape: ModelShape) -> dict[str, Any]:
    """What a checkpoint says about its model."""
    return shape.described if isinstance(shape, HfShape) else asdict(shape)


def units_per_layer(shape: ModelShape) -> int:
    """2 where a layer is cut into attention and MLP, else 1."""
    return 1 if isinstance(shape, HfShape) else 2
