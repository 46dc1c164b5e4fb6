"""What the units of a model take on one rank, as the cost model and the planner count it."""

from __future__ import annotations

from dataclasses import replace

from launcher.workloads.model_share import model_shares
from launcher.workloads.selective import Layers, selective_shares
from launcher.workloads.specs import PlannedShape, model_units
from launcher.workloads.traced_shape import TracedShape
from strategies.costs.analytic import Load


def unit_loads(
    shape: PlannedShape,
    tp: int,
    microbatch_size: int,
    *,
    sequence_parallel: bool = False,
    selective: bool = False,
    layers: Layers = (),
) -> tuple[Load, ...]:
    """One load per unit, in execution order.

    Args:
        shape: The model.
        tp: Ranks that share its matrices.
        microbatch_size: Sequences of a microbatch.
        sequence_parallel: Whether activations are cut between those ranks.
        selective: Whether layers recompute what is cheap (``recompute=selective``).
        layers: What they recompute, by type, where that is not the default.

    Raises:
        PlanError: ``layers`` names a type that the model does not have.
    """
    if isinstance(shape, TracedShape):
        assert tp == 1
        assert not selective
        return shape.loads(microbatch_size)
    units = model_units(shape)
    stream = shape.sequence * shape.hidden * microbatch_size
    loads = tuple(
        Load(
            unit.forward_flops * microbatch_size,
            unit.parameters,
            unit.output_elements * microbatch_size,
            unit.saved_elements * microbatch_size,
            (stream,) * unit.forward_sums,
            (stream,) * unit.backward_sums,
            owns=(0,) if number == 0 else (),
            # Tied is the embedding's matrix, which tensor-parallel ranks share.
            tied=((0, spec.tied_parameters // tp),) if spec.tied_parameters else (),
        )
        for number, (spec, unit) in enumerate(
            zip(units, model_shares(shape, tp, sequence_parallel=sequence_parallel), strict=True)
        )
    )
    if not selective:
        return loads
    kept = selective_shares(shape, tp, sequence_parallel=sequence_parallel, layers=layers)
    return tuple(
        replace(
            load,
            saved_elements=share.saved_elements * microbatch_size,
            again_flops=share.again_flops * microbatch_size,
        )
        for load, share in zip(loads, kept, strict=True)
    )
