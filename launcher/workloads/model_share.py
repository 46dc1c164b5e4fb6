"""What one of ``tp`` ranks has of a model, whichever kind of model it is. Torch-free."""

from __future__ import annotations

from launcher.workloads.hf.shape import HfShape
from launcher.workloads.hf.share import check_hf_tp, hf_shares
from launcher.workloads.specs import ModelShape, PlannedShape, model_units
from launcher.workloads.traced_shape import TracedShape, check_traced_tp
from launcher.workloads.transformer_share import (
    UnitShare,
    check_transformer_tp,
    padded_vocab,
    unit_shares,
)


def check_tp(shape: PlannedShape, tp: int, *, sequence_parallel: bool = False) -> None:
    """Refuses a number of ranks that a model cannot be cut into.

    Raises:
        PlanError: With the nearest numbers that work.
    """
    if isinstance(shape, TracedShape):
        check_traced_tp(shape, tp)
    elif isinstance(shape, HfShape):
        check_hf_tp(shape, tp, sequence_parallel=sequence_parallel)
    else:
        check_transformer_tp(shape, tp, sequence_parallel=sequence_parallel)


def model_shares(
    shape: ModelShape, tp: int, *, sequence_parallel: bool = False
) -> tuple[UnitShare, ...]:
    """The units in execution order, on one of ``tp`` ranks."""
    if tp == 1:
        return tuple(
            UnitShare(
                spec.parameters,
                spec.forward_flops,
                spec.output_elements,
                spec.saved_elements,
                forward_sums=0,
                backward_sums=0,
            )
            for spec in model_units(shape)
        )
    if isinstance(shape, HfShape):
        return hf_shares(shape, tp)
    return unit_shares(shape, tp, sequence_parallel=sequence_parallel)


def vocabulary_note(shape: ModelShape, tp: int) -> str | None:
    """What is to be said about unused token ids; None if there are none."""
    padded = padded_vocab(shape.vocab, tp)
    if padded == shape.vocab:
        return None
    return (
        f"vocabulary padded from {shape.vocab} to {padded} for tp={tp}; the weights are drawn "
        "unpadded, and padding is never predicted"
    )
