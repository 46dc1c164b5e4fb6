"""What the units of a model cost, whichever kind of model it is. Torch-free."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launcher.workloads.hf.shape import HfShape
from launcher.workloads.traced_shape import TracedShape
from launcher.workloads.transformer_shape import TransformerShape, UnitSpec, unit_specs

ModelShape = TransformerShape | HfShape
# A traced model is one for planning only: ranks build it, whatever it is.
PlannedShape = ModelShape | TracedShape


def model_units(shape: PlannedShape) -> tuple[UnitSpec, ...]:
    """The units in execution order; the first is the embedding, the last the head."""
    return unit_specs(shape) if isinstance(shape, TransformerShape) else shape.unit_specs()


def model_costs(shape: PlannedShape) -> tuple[float, ...]:
    """Relative forward cost of each unit, > 0; see ``transformer_shape.unit_costs``."""
    return tuple(float(max(u.forward_flops, u.output_elements)) for u in model_units(shape))


def described(shape: ModelShape) -> dict[str, Any]:
    """What a checkpoint says about its model."""
    return shape.described if isinstance(shape, HfShape) else asdict(shape)


def units_per_layer(shape: PlannedShape) -> int:
    """2 where a layer is cut into attention and MLP, else 1."""
    return 2 if isinstance(shape, TransformerShape) else 1
