"""What the units of a model take on one rank, as the cost model and the planner count it."""

from __future__ import annotations

from launcher.workloads.model_share import model_shares
from launcher.workloads.specs import ModelShape
from strategies.costs.analytic import Load


def unit_loads(
    shape: ModelShape, tp: int, microbatch_size: int, *, sequence_parallel: bool = False
) -> tuple[Load, ...]:
    """One load per unit, in execution order.

    Args:
        shape: The model.
        tp: Ranks that share its matrices.
        microbatch_size: Sequences of a microbatch.
        sequence_parallel: Whether activations are cut between those ranks.
    """
    stream = shape.sequence * shape.hidden * microbatch_size
    return tuple(
        Load(
            unit.forward_flops * microbatch_size,
            unit.parameters,
            unit.output_elements * microbatch_size,
            unit.saved_elements * microbatch_size,
            (stream,) * unit.forward_sums,
            (stream,) * unit.backward_sums,
        )
        for unit in model_shares(shape, tp, sequence_parallel=sequence_parallel)
    )
