"""What one of ``tp`` ranks that share a transformer's matrices holds, computes and exchanges.

Torch-free, like the shape. Norms, biases of the layers that end a branch, positions and the
residual stream are whole on every rank; heads, inner width and vocabulary are cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from launcher.workloads.transformer_shape import TransformerShape, UnitSpec, unit_specs
from strategies.errors import PlanError


@dataclass(frozen=True, slots=True)
class UnitShare:
    """One unit on one rank, per sequence of full length."""

    parameters: int  # that the rank holds, padding included
    forward_flops: float  # matrix products of its share
    output_elements: int  # of the whole tensor behind the unit
    saved_elements: int  # that the rank keeps from forward to backward
    forward_sums: int  # tensors of the residual stream that the forward adds up over ranks
    backward_sums: int  # the same in the backward


def check_transformer_tp(
    shape: TransformerShape, tp: int, *, sequence_parallel: bool = False
) -> None:
    """Refuses a number of ranks that the heads, the MLP or the sequence cannot be cut into."""
    if shape.moe is not None and sequence_parallel:
        raise PlanError(
            f"sequence_parallel=true with model.experts={shape.moe.experts}: a layer's balance "
            "loss is of whole sequences. Try sequence_parallel=false."
        )
    sizes = {"model.heads": shape.heads, "model.kv_heads": shape.kv_heads, "model.ffn": shape.ffn}
    if sequence_parallel:
        sizes["model.sequence"] = shape.sequence
    refuse_tp(tp, sizes)


def refuse_tp(tp: int, sizes: Mapping[str, int]) -> None:
    """Refuses a number of ranks that does not divide all sizes."""
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % tp]
    if wrong:
        common = math.gcd(*sizes.values())
        fitting = [number for number in range(1, common + 1) if common % number == 0]
        below = max(number for number in fitting if number < tp)
        above = min((number for number in fitting if number > tp), default=None)
        choices = f"tp={below}" + (f" or tp={above}" if above is not None else "")
        raise PlanError(f"tp={tp} does not divide {' and '.join(wrong)}. Try {choices}.")


def refuse_ep(ep: int, experts: int, asked: str) -> None:
    """Refuses a number of ranks that the experts of a layer do not come out even on."""
    fit = max(number for number in range(1, ep) if experts % number == 0)
    raise PlanError(f"ep={ep} does not divide {asked}. Try ep={fit}.")


def padded_vocab(vocab: int, tp: int) -> int:
    """A vocabulary with as many unused ids as make it come out even."""
    return -(-vocab // tp) * tp


def unit_shares(
    shape: TransformerShape, tp: int, *, sequence_parallel: bool = False
) -> tuple[UnitShare, ...]:
    """The units in execution order, on one of ``tp >= 2`` ranks."""
    specs = unit_specs(shape)
    last = len(specs) - 1
    return tuple(
        _first(shape, spec, tp)
        if index == 0
        else _head(shape, spec, tp, sequence_parallel)
        if index == last
        else _sparse(shape, spec, tp)
        if index % 2 == 0 and index // 2 - 1 in shape.moe_layers
        else _branch(shape, spec, tp, sequence_parallel, attention=index % 2 == 1)
        for index, spec in enumerate(specs)
    )


def _first(shape: TransformerShape, spec: UnitSpec, tp: int) -> UnitShare:
    table = padded_vocab(shape.vocab, tp) // tp * shape.hidden
    whole = spec.parameters - shape.vocab * shape.hidden
    return UnitShare(table + whole, 0, spec.output_elements, spec.saved_elements, 1, 0)


def _branch(
    shape: TransformerShape, spec: UnitSpec, tp: int, sequence_parallel: bool, *, attention: bool
) -> UnitShare:
    norm = shape.hidden * (2 if shape.norm == "layernorm" else 1)
    whole = norm + (shape.hidden if shape.biases else 0)
    if attention:
        inner = 2 * shape.hidden + 2 * shape.kv_hidden + shape.heads
    else:
        inner = (4 if shape.activation == "swiglu" else 2) * shape.ffn
    cut = shape.sequence * inner
    # Of what is whole, rotary tables stay so; the rest, the matrices' input too, is the stream's.
    kept = shape.sequence * 2 * shape.head_size if attention and shape.position == "rope" else 0
    on_stream = spec.saved_elements - cut - kept
    return UnitShare(
        parameters=(spec.parameters - whole) // tp + whole,
        forward_flops=spec.forward_flops / tp,
        output_elements=spec.output_elements,
        saved_elements=cut // tp + kept + on_stream // (tp if sequence_parallel else 1),
        forward_sums=1,
        backward_sums=1,
    )


def _sparse(shape: TransformerShape, spec: UnitSpec, tp: int) -> UnitShare:
    """Norm, router and the stream are whole; each rank has its share of the tokens computed."""
    moe, part = shape.moe, expert_part(shape)
    assert moe is not None
    gated = shape.activation == "swiglu"
    shared = (3 if gated else 2) * shape.hidden * moe.shared * moe.ffn
    kept = shape.sequence * moe.shared * moe.ffn * (4 if gated else 2)
    computed = part.forward_flops + 2 * shape.sequence * shared
    return UnitShare(
        parameters=spec.parameters - shared + shared // tp,
        forward_flops=spec.forward_flops - computed + computed / tp,
        output_elements=spec.output_elements,
        saved_elements=spec.saved_elements - (part.saved_elements + kept) * (tp - 1) // tp,
        forward_sums=1 if moe.shared else 0,
        backward_sums=1 if moe.shared else 0,
    )


class ExpertPart(NamedTuple):
    """What of a layer belongs to its experts, per sequence; on all ranks that share them."""

    parameters: int
    forward_flops: float
    saved_elements: int
    exchanged: int  # elements of all tokens on their way


def expert_part(shape: TransformerShape) -> ExpertPart:
    moe = shape.moe
    assert moe is not None
    gated = shape.activation == "swiglu"
    matrices = (3 if gated else 2) * shape.hidden * moe.ffn
    rows = shape.sequence * moe.per_token
    return ExpertPart(
        parameters=moe.experts * matrices,
        forward_flops=2.0 * rows * matrices,
        saved_elements=rows * (shape.hidden + (4 if gated else 2) * moe.ffn),
        exchanged=rows * shape.hidden,
    )


def _head(shape: TransformerShape, spec: UnitSpec, tp: int, sequence_parallel: bool) -> UnitShare:
    ids = padded_vocab(shape.vocab, tp) // tp
    norm = shape.hidden * (2 if shape.norm == "layernorm" else 1)
    on_stream = spec.saved_elements - shape.sequence * (shape.vocab + 1)
    return UnitShare(
        parameters=norm + (0 if shape.tie_embeddings else ids * shape.hidden),
        forward_flops=spec.forward_flops / shape.vocab * ids,
        output_elements=spec.output_elements,
        saved_elements=shape.sequence * (ids + 1) + on_stream // (tp if sequence_parallel else 1),
        forward_sums=0,
        backward_sums=1,
    )
