"""What layers of the transformers library do, as far as keeping and recomputing go. Torch-free.

For the families whose numbers are known from ``config.json``, in the terms of
``launcher.workloads.layer_steps``. Rotary tables come from outside the layer, once for all of them.
"""

from __future__ import annotations

from launcher.workloads.hf.families import Sizes
from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.layer_steps import (
    Asked,
    Cut,
    Made,
    Step,
    dropped,
    made,
    masked,
    norm,
    product,
    root_mean_square,
    scores,
)
from launcher.workloads.transformer_share import padded_vocab

_LAYERS = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "gpt2": "GPT2Block",
}


def type_names(shape: HfShape) -> tuple[tuple[str, ...], ...]:
    """By which types embedding, layers and head can be called."""
    layer = _LAYERS.get(str(shape.config.get("model_type")))
    return (
        ("EmbeddingPart",),
        ("LayerPart", layer) if layer is not None else ("LayerPart",),
        ("HeadPart",),
    )


def hf_steps(shape: HfShape, tp: int) -> tuple[tuple[Step, ...], ...]:
    """What embedding, a layer and the head do for one sequence, on one of ``tp`` ranks."""
    sizes = shape.sizes
    assert sizes is not None
    tokens = shape.sequence
    cut = Cut(
        tokens=tokens,
        rows=tokens,
        hidden=sizes.hidden,
        dropout=sizes.residual_dropout,
        rms=sizes.kind == "llama",
        biases=sizes.mlp_bias,
    )
    ids = padded_vocab(sizes.vocab, tp) // tp
    first: tuple[Step, ...] = (Asked("ids", tokens), made("looked up", cut.stream, "activation"))
    if sizes.embedding_dropout:
        first += masked("mask", cut.stream)
    head = (*norm(cut, "in"), Asked("normed"), product("logits", tokens * ids, biases=False))
    layer = _gpt2_layer(sizes, cut, tp) if sizes.kind == "gpt2" else _llama_layer(sizes, cut, tp)
    return first, layer, head


def _llama_layer(sizes: Sizes, cut: Cut, tp: int) -> tuple[Step, ...]:
    tokens = cut.tokens
    steps: list[Step] = [*norm(cut, "in")]
    wide = tokens * sizes.heads * sizes.head_size // tp
    narrow = tokens * sizes.kv_heads * sizes.head_size // tp
    names = {"query": "query", "key": "key"}
    for name, size, heads in (("query", wide, sizes.heads), ("key", narrow, sizes.kv_heads)):
        steps += [Asked("normed"), _projected(name, size, sizes, biases=sizes.attention_bias)]
        if sizes.head_norm:
            names[name] = f"normed {name}"
            steps += root_mean_square(
                name, size, tokens * heads // tp, first=f"scaled {name}", result=names[name]
            )
    steps += [Asked("normed"), _projected("value", narrow, sizes, biases=sizes.attention_bias)]
    steps += [made("rotated query", wide, "activation"), made("rotated key", narrow, "activation")]
    sources = ("rotated key", "rotated query", "value")
    steps += scores(sources, wide, tokens * sizes.heads // tp, 4.0 * tokens * wide)
    branch_flops = 2.0 * wide * sizes.hidden
    steps += [
        product("branch", cut.stream, biases=sizes.output_bias, flops=branch_flops),
        made("middle", cut.stream, "activation"),
        *norm(cut, "middle", " again"),
    ]
    inner = tokens * sizes.ffn // tp
    steps += [
        Asked("normed again"), _projected("gate", inner, sizes, biases=sizes.mlp_bias),
        Asked("gate"), made("curved", inner, "activation"),
        Asked("normed again"), _projected("up", inner, sizes, biases=sizes.mlp_bias),
        Asked("up"), Asked("curved"), made("gated", inner, "activation"), Asked("gated"),
        product("end", cut.stream, biases=sizes.mlp_bias),
    ]  # fmt: skip
    return tuple(steps)


def _gpt2_layer(sizes: Sizes, cut: Cut, tp: int) -> tuple[Step, ...]:
    tokens, heads = cut.tokens, sizes.heads // tp
    wide, inner = tokens * heads * sizes.head_size, tokens * sizes.ffn // tp
    steps: list[Step] = [
        *norm(cut, "in"),
        Asked("normed"), _projected("joined", 3 * wide, sizes, biases=True),
        *(_dropped_scores(heads, tokens, wide) if sizes.attention_dropout else
          scores(("joined", "joined", "joined"), wide, tokens * heads, 4.0 * tokens * wide)),
        product("branch", cut.stream, biases=True, flops=2.0 * wide * sizes.hidden),
        *dropped(cut),
        made("middle", cut.stream, "activation"),
        *norm(cut, "middle", " again"),
        Asked("normed again"), _projected("up", inner, sizes, biases=True),
        made("half", inner, "activation"), Asked("up"),
        made("bent", inner, "activation"), Asked("bent"),
        made("bent and one", inner, "activation"), Asked("bent and one"), Asked("half"),
        made("curved", inner, "activation"), Asked("curved"),
        product("end", cut.stream, biases=True),
        *dropped(cut, " again"),
    ]  # fmt: skip
    return tuple(steps)


def _dropped_scores(heads: int, tokens: int, wide: int) -> tuple[Step, ...]:
    """The attention core with dropout, which has no kernel of its own on CPUs."""
    pairs = heads * tokens * tokens
    half = 2.0 * tokens * wide
    return (
        made("scaled query", wide, "activation"), made("scaled key", wide, "activation"),
        Asked("scaled key"), Asked("scaled query"),
        Made(("attention", "activation"), (("scores", pairs),), half),
        made("shares", pairs, "attention"), Asked("shares"),
        *masked("score mask", pairs),
        made("dropped shares", pairs, "activation"), Asked("joined"), Asked("dropped shares"),
        Made(("attention", "activation"), (("mixed", wide),), half),
        made("mixed in order", wide, "activation"), Asked("mixed in order"),
    )  # fmt: skip


def _projected(name: str, elements: int, sizes: Sizes, *, biases: bool) -> Made:
    return product(name, elements, biases=biases, flops=2.0 * elements * sizes.hidden)
