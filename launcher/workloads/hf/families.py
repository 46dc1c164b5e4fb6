"""The families whose tensors are known from ``config.json`` alone: what each unit holds.

With these numbers a run is cut, costed and checked before torch is imported. Every other
architecture of the transformers library is trained, too, but cut on the ranks, by its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

from launcher.workloads.hf.config_json import truth, whole_number

Tensors = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture and the values that a ``config.json`` may leave out.

    Attributes:
        kind: ``llama`` (RMSNorm, SwiGLU, rotary) or ``gpt2`` (LayerNorm, GELU, learned positions).
        layers_path: Where the list of decoder layers is.
        prefix: The part of tensor names that files of older versions leave out.
        defaults: Of the transformers library's configuration class.
    """

    kind: str
    layers_path: str
    prefix: str
    defaults: Mapping[str, Any]


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
_QWEN = _LLAMA | {
    "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "tie_word_embeddings": True,
}


def _llama_like(defaults: Mapping[str, Any]) -> Family:
    return Family("llama", "model.layers", "model.", MappingProxyType(dict(defaults)))


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _llama_like(_LLAMA),
        "mistral": _llama_like(_MISTRAL),
        "qwen2": _llama_like(_QWEN),
        "qwen3": _llama_like(_QWEN | {"head_dim": 128}),
        "gpt2": Family("gpt2", "transformer.h", "transformer.", MappingProxyType(_GPT2)),
    }
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of one model of a known family.

    Attributes:
        kind: As in ``Family``.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_size: Width of a head; ``heads * head_size`` need not be ``hidden``.
        ffn: Inner width of the MLP.
        vocab: Token ids.
        positions: Longest sequence.
        tied: Whether the head projects with the embedding's weight.
        attention_bias: Whether queries, keys and values have biases.
        output_bias: Whether the attention's output projection has one.
        mlp_bias: Whether the MLP has them.
        head_norm: Whether queries and keys are normalised per head.
        attention_dropout: Whether attention probabilities are dropped in training.
        residual_dropout: Whether both branches are.
        embedding_dropout: Whether the embedding is.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    positions: int
    tied: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    attention_dropout: bool
    residual_dropout: bool
    embedding_dropout: bool


def read_sizes(config: Mapping[str, Any]) -> Sizes | None:
    """The numbers of a model, or None for a family that is not known here.

    Raises:
        ModelError: A number is missing or wrong.
    """
    model_type = config["model_type"]
    family = FAMILIES.get(model_type)
    if family is None or config.get("add_cross_attention"):
        return None
    full = dict(family.defaults) | {k: v for k, v in config.items() if v is not None}
    hidden = whole_number(full, ("hidden_size", "n_embd"), None)
    heads = whole_number(full, ("num_attention_heads", "n_head"), None)
    tied = truth(full, "tie_word_embeddings", family.defaults["tie_word_embeddings"])
    gpt2 = family.kind == "gpt2"
    bias = gpt2 or (model_type in ("llama", "qwen3") and truth(full, "attention_bias", False))
    ffn_names = ("n_inner",) if gpt2 else ("intermediate_size",)
    return Sizes(
        kind=family.kind,
        layers=whole_number(full, ("num_hidden_layers", "n_layer"), None),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if gpt2 else whole_number(full, ("num_key_value_heads",), heads),
        head_size=hidden // heads if gpt2 else whole_number(full, ("head_dim",), hidden // heads),
        ffn=whole_number(full, ffn_names, 4 * hidden),
        vocab=whole_number(full, ("vocab_size",), None),
        positions=whole_number(full, ("max_position_embeddings", "n_positions"), None),
        tied=tied,
        attention_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=gpt2 or (model_type == "llama" and truth(full, "mlp_bias", False)),
        head_norm=model_type == "qwen3",
        attention_dropout=bool(full.get("attn_pdrop" if gpt2 else "attention_dropout")),
        residual_dropout=bool(full.get("resid_pdrop")),
        embedding_dropout=bool(full.get("embd_pdrop")),
    )


def tensors_of(sizes: Sizes) -> tuple[Tensors, ...]:
    """Name and shape of every tensor, per unit: embedding, each layer, head.

    A tied projection is listed with the head although the embedding owns it.
    """
    if sizes.kind == "gpt2":
        wide = (sizes.vocab, sizes.hidden)
        return (
            {
                "transformer.wte.weight": wide,
                "transformer.wpe.weight": (sizes.positions, sizes.hidden),
            },
            *(_gpt2_layer(sizes, f"transformer.h.{i}.") for i in range(sizes.layers)),
            {
                "transformer.ln_f.weight": (sizes.hidden,),
                "transformer.ln_f.bias": (sizes.hidden,),
                "lm_head.weight": wide,
            },
        )
    return (
        {"model.embed_tokens.weight": (sizes.vocab, sizes.hidden)},
        *(_llama_layer(sizes, f"model.layers.{i}.") for i in range(sizes.layers)),
        {"model.norm.weight": (sizes.hidden,), "lm_head.weight": (sizes.vocab, sizes.hidden)},
    )


def count(tensors: Tensors) -> int:
    """Elements of all tensors together."""
    return sum(prod(shape) for shape in tensors.values())


def _llama_layer(sizes: Sizes, prefix: str) -> Tensors:
    hidden, wide = sizes.hidden, sizes.heads * sizes.head_size
    narrow = sizes.kv_heads * sizes.head_size
    found: Tensors = {"input_layernorm.weight": (hidden,)}
    for name, width in (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)):
        _linear(found, f"self_attn.{name}", width, hidden, bias=sizes.attention_bias)
    _linear(found, "self_attn.o_proj", hidden, wide, bias=sizes.output_bias)
    if sizes.head_norm:
        found["self_attn.q_norm.weight"] = found["self_attn.k_norm.weight"] = (sizes.head_size,)
    found["post_attention_layernorm.weight"] = (hidden,)
    _linear(found, "mlp.gate_proj", sizes.ffn, hidden, bias=sizes.mlp_bias)
    _linear(found, "mlp.up_proj", sizes.ffn, hidden, bias=sizes.mlp_bias)
    _linear(found, "mlp.down_proj", hidden, sizes.ffn, bias=sizes.mlp_bias)
    return {prefix + name: shape for name, shape in found.items()}


def _gpt2_layer(sizes: Sizes, prefix: str) -> Tensors:
    hidden = sizes.hidden
    found: Tensors = {}
    for name, inputs, outputs in (
        ("attn.c_attn", hidden, 3 * hidden),
        ("attn.c_proj", hidden, hidden),
        ("mlp.c_fc", hidden, sizes.ffn),
        ("mlp.c_proj", sizes.ffn, hidden),
    ):
        # Stored as [inputs, outputs], the other way round than a linear layer's weight.
        found[f"{name}.weight"], found[f"{name}.bias"] = (inputs, outputs), (outputs,)
    for norm in ("ln_1", "ln_2"):
        found[f"{norm}.weight"] = found[f"{norm}.bias"] = (hidden,)
    return {prefix + name: shape for name, shape in found.items()}


def _linear(found: Tensors, name: str, outputs: int, inputs: int, *, bias: bool) -> None:
    found[f"{name}.weight"] = (outputs, inputs)
    if bias:
        found[f"{name}.bias"] = (outputs,)
