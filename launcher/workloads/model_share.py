"""What one of ``tp`` ranks has of a model, whichever kind of model it is. Torch-free."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launcher.workloads.hf.hf_shape import HfShape, check_hf_ep, check_hf_tp, hf_shares
from launcher.workloads.traced_shape import TracedShape, check_traced_ep, check_traced_tp
from launcher.workloads.transformer_shape import TransformerShape, UnitSpec, unit_specs
from launcher.workloads.transformer_share import (
    UnitShare,
    check_transformer_tp,
    padded_vocab,
    refuse_ep,
    unit_shares,
)
from strategies.errors import PlanError


def check_tp(shape: PlannedShape, tp: int, *, sequence_parallel: bool = False) -> None:
    """Refuses a number of ranks that a model cannot be cut into."""
    if isinstance(shape, TracedShape):
        check_traced_tp(shape, tp)
    elif isinstance(shape, HfShape):
        check_hf_tp(shape, tp, sequence_parallel=sequence_parallel)
    else:
        check_transformer_tp(shape, tp, sequence_parallel=sequence_parallel)


def check_ep(shape: PlannedShape, ep: int, tp: int = 1) -> None:
    """Refuses a number of ranks that a model's experts cannot be spread over.

    Raises:
        PlanError: It has none, or they do not come out even; or one that is traced has its
            matrices cut (tp), too.
    """
    if ep == 1:
        return
    if isinstance(shape, TracedShape):
        check_traced_ep(shape, ep, tp)
    elif isinstance(shape, HfShape):
        check_hf_ep(shape, ep)
    elif shape.moe is None:
        raise PlanError(
            f"ep={ep} spreads the experts of a model over ranks, and this one has none. Try ep=1, "
            "or model.experts=8."
        )
    elif shape.moe.experts % ep:
        refuse_ep(ep, shape.moe.experts, f"model.experts={shape.moe.experts}")


def check_expert_tp(shape: PlannedShape, tp: int) -> None:
    """Refuses a number of ranks that each expert's matrices cannot be cut over.

    Raises:
        PlanError: There are no experts, or nobody knows how they are cut, or they come out uneven.
    """
    if not isinstance(shape, TransformerShape):
        name = shape.name if isinstance(shape, TracedShape) else "hf"
        raise PlanError(
            f"expert_tp=true with model={name}: a trace knows its experts whole. Try "
            "expert_tp=false, or mode=train tp=2 expert_tp=true with degrees of your own."
        )
    if shape.moe is None:
        raise PlanError(
            "expert_tp=true cuts experts over the ranks of tp, and this model has none. Try "
            "expert_tp=false, or model.experts=8."
        )
    if shape.moe.ffn % tp:
        raise PlanError(
            f"expert_tp=true: tp={tp} does not divide model.expert_ffn={shape.moe.ffn}. Try "
            f"model.expert_ffn={-(-shape.moe.ffn // tp) * tp}, or expert_tp=false."
        )


def model_shares(
    shape: ModelShape, tp: int, *, sequence_parallel: bool = False
) -> tuple[UnitShare, ...]:
    if tp == 1:
        return tuple(
            UnitShare(s.parameters, s.forward_flops, s.output_elements, s.saved_elements, 0, 0)
            for s in model_units(shape)
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


ModelShape = TransformerShape | HfShape
# A traced model is one for planning only: ranks build it, whatever it is.
PlannedShape = ModelShape | TracedShape


def model_units(shape: PlannedShape) -> tuple[UnitSpec, ...]:
    """The units in execution order; the first is the embedding, the last the head."""
    return unit_specs(shape) if isinstance(shape, TransformerShape) else shape.unit_specs()


def model_flops(shape: PlannedShape) -> int:
    """Of a forward of one sequence, without the scores that a causal mask hides: half of them.

    A trace does not say which products are scores: all of them count.
    """
    flops = sum(unit.forward_flops for unit in model_units(shape))
    if isinstance(shape, TracedShape):
        return flops
    if isinstance(shape, HfShape):
        assert shape.sizes is not None
        width = shape.sizes.heads * shape.sizes.head_size
    else:
        width = shape.heads * shape.head_size
    return flops - shape.layers * 2 * shape.sequence**2 * width


def model_costs(shape: PlannedShape) -> tuple[float, ...]:
    """Relative forward cost of each unit, > 0; see ``transformer_shape.unit_costs``."""
    return tuple(float(max(u.forward_flops, u.output_elements)) for u in model_units(shape))


def described(shape: ModelShape) -> dict[str, Any]:
    return shape.described if isinstance(shape, HfShape) else asdict(shape)


def units_per_layer(shape: PlannedShape) -> int:
    """2 where a layer is cut into attention and MLP, else 1."""
    return 2 if isinstance(shape, TransformerShape) else 1
