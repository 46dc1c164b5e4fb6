"""Memory per rank of a walked order: the sums of ``strategies.memory``, from counts."""

from __future__ import annotations

from strategies.costs.table import CostTable
from strategies.planner.structure import Structure


def rank_bytes(structure: Structure, table: CostTable) -> tuple[int, ...]:
    """Peak per rank: weights, gradients, optimizer state and activations.

    Args:
        structure: The order.
        table: For as many stages, with bytes.
    """
    assert table.activation_bytes is not None
    assert table.state_bytes is not None
    full = table.activation_bytes
    shares = table.stage_input or (0.0,) * len(full)
    inputs = [share * size for share, size in zip(shares, full, strict=True)]
    result = []
    for rank, moments in enumerate(structure.held):
        state = sum(table.state_bytes[stage] for stage in structure.stages_by_end[rank])
        peak = max(
            (
                sum(whole * full[stage] + kept * inputs[stage] for stage, whole, kept in moment)
                for moment in moments
            ),
            default=0.0,
        )
        result.append(int(state + peak))
    return tuple(result)
