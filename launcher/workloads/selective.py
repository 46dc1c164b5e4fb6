"""What units keep, and compute again, under ``recompute=selective``. Torch-free.

A layer keeps its input and what products with weights give where something asks for it: queries,
keys, values, the MLP's inner activations, and with dropout what is dropped. Norms, activation
functions and the attention core are computed again. The loss is no layer; its share stays. This is
what the policy does by default: ``recompute.layers`` is not looked at.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.workloads.hf.shape import HfShape
from launcher.workloads.specs import ModelShape
from launcher.workloads.transformer_share import padded_vocab


class SelectiveShare(NamedTuple):
    """One unit on one of ``tp`` ranks, per sequence.

    Attributes:
        saved_elements: Kept from forward to backward.
        again_flops: Of products that a backward computes again.
    """

    saved_elements: int
    again_flops: float


def selective_shares(
    shape: ModelShape, tp: int, *, sequence_parallel: bool = False
) -> tuple[SelectiveShare, ...]:
    """The units in execution order, on one of ``tp`` ranks."""
    tokens, ids = shape.sequence, padded_vocab(shape.vocab, tp) // tp
    stream = tokens * shape.hidden // (tp if sequence_parallel else 1)
    if isinstance(shape, HfShape):
        layers = [_hf_layer(shape, stream, tp)] * shape.layers
        first = tokens
    else:
        dropped = stream if shape.dropout else 0
        inner = 2 if shape.activation == "swiglu" else 1
        heads = tokens * (shape.hidden + 2 * shape.kv_hidden) // tp
        scores = 4 * tokens * tokens * shape.hidden / tp
        layers = [
            SelectiveShare(stream + heads + dropped, scores),
            SelectiveShare(stream + tokens * inner * shape.ffn // tp + dropped, 0.0),
        ] * shape.layers
        first = tokens
    head = SelectiveShare(stream + tokens * ids + tokens, 0.0)
    return (SelectiveShare(first, 0.0), *layers, head)


def _hf_layer(shape: HfShape, stream: int, tp: int) -> SelectiveShare:
    sizes = shape.sizes
    assert sizes is not None
    wide, narrow = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    inner = 2 if sizes.kind == "llama" else 1
    cut = shape.sequence * (wide + 2 * narrow + inner * sizes.ffn) // tp
    # The MLP's norm reads the attention's output, so that product is asked for, too.
    whole = (3 if sizes.residual_dropout else 2) * stream
    scores = 4 * shape.sequence**2 * wide / tp
    return SelectiveShare(whole + cut, scores)
