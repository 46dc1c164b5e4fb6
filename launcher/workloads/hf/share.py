"""What one of ``tp`` ranks has of a model of the transformers library. Torch-free.

Layers are cut by the library's own plan (heads, inner width), embedding and head by token ids.
"""

from __future__ import annotations

import math

from launcher.workloads.hf.shape import HfShape
from launcher.workloads.transformer_share import UnitShare, padded_vocab, refuse_tp
from strategies.errors import PlanError

# Vectors that belong to the outputs of a matrix that is cut by them.
_CUT_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "gate_proj.bias", "up_proj.bias")


def check_hf_tp(shape: HfShape, tp: int, *, sequence_parallel: bool = False) -> None:
    """Refuses what the library's layers cannot be cut into.

    Raises:
        PlanError: With what works.
    """
    if sequence_parallel:
        raise PlanError(
            "sequence_parallel=true: layers of the transformers library take the whole sequence. "
            f"Try tp={tp} sequence_parallel=false, or a built-in model."
        )
    if tp == 1 or shape.sizes is None:
        return
    if shape.sizes.kind == "gpt2":
        raise PlanError(
            f"tp={tp}: the transformers library keeps queries, keys and values of model_type=gpt2 "
            "in one matrix, which has no plan for several ranks. Try tp=1, or model=gpt2_124m."
        )
    sizes = {
        "num_attention_heads": shape.sizes.heads,
        "num_key_value_heads": shape.sizes.kv_heads,
        "intermediate_size": shape.sizes.ffn,
    }
    refuse_tp(tp, sizes)


def hf_shares(shape: HfShape, tp: int) -> tuple[UnitShare, ...]:
    """Embedding, each layer, head; for known families."""
    sizes = shape.sizes
    assert sizes is not None
    specs = shape.unit_specs()
    boundary = shape.sequence * sizes.hidden
    ids = padded_vocab(sizes.vocab, tp) // tp
    first, *layers, head = specs
    found = [
        UnitShare(ids * sizes.hidden, 0, first.output_elements, first.saved_elements, 1, 0),
    ]
    for spec, tensors in zip(layers, shape.tensors()[1:-1], strict=True):
        cut = sum(
            math.prod(size)
            for name, size in tensors.items()
            if len(size) == 2 or name.endswith(_CUT_BIASES)
        )
        # Both norms' inputs and outputs are whole.
        whole = min(spec.saved_elements, 6 * boundary)
        found.append(
            UnitShare(
                parameters=cut // tp + spec.parameters - cut,
                forward_flops=spec.forward_flops / tp,
                output_elements=spec.output_elements,
                saved_elements=whole + (spec.saved_elements - whole) // tp,
                forward_sums=2,
                backward_sums=2,
            )
        )
    logits = shape.sequence * sizes.vocab
    found.append(
        UnitShare(
            parameters=sizes.hidden + (0 if sizes.tied else ids * sizes.hidden),
            forward_flops=head.forward_flops / sizes.vocab * ids,
            output_elements=head.output_elements,
            saved_elements=head.saved_elements - logits + shape.sequence * ids,
            forward_sums=0,
            backward_sums=1,
        )
    )
    return tuple(found)
