"""The families whose tensors are known from ``config.json`` alone: what each unit holds.

With these numbers a run is cut, costed and checked before torch is imported. Every other
architecture of the transformers library is trained, too, but cut on the ranks, by its parameters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from strategies.errors import ModelError
from strategies.small_file import FileRefusedError, read_json

Tensors = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture and the values that a ``config.json`` may leave out."""

    kind: str  # llama (RMSNorm, SwiGLU, rotary) or gpt2 (LayerNorm, GELU, learned positions)
    layers_path: str  # where the list of decoder layers is
    prefix: str  # the part of tensor names that files of older versions leave out
    defaults: Mapping[str, Any]  # of the transformers library's configuration class


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
_QWEN = _LLAMA | {
    "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "tie_word_embeddings": True,
}  # fmt: skip


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
    """The numbers of one model of a known family."""

    kind: str  # as in ``Family``
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int  # ``heads * head_size`` need not be ``hidden``
    ffn: int
    vocab: int
    positions: int  # longest sequence
    tied: bool  # whether the head projects with the embedding's weight
    attention_bias: bool  # of queries, keys and values
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    head_norm: bool  # whether queries and keys are normalised per head
    attention_dropout: bool  # of attention probabilities
    residual_dropout: bool  # of both branches
    embedding_dropout: bool


def read_sizes(config: Mapping[str, Any]) -> Sizes | None:
    """The numbers of a model, or None for a family that is not known here."""
    model_type = config["model_type"]
    family = FAMILIES.get(model_type)
    if family is None or config.get("add_cross_attention"):
        return None
    full = dict(family.defaults) | {k: v for k, v in config.items() if v is not None}
    hidden = whole_number(full, ("hidden_size", "n_embd"), None)
    heads = whole_number(full, ("num_attention_heads", "n_head"), None)
    tied = _truth(full, "tie_word_embeddings", family.defaults["tie_word_embeddings"])
    gpt2 = family.kind == "gpt2"
    bias = gpt2 or (model_type in ("llama", "qwen3") and _truth(full, "attention_bias", False))
    ffn_names = ("n_inner",) if gpt2 else ("intermediate_size",)
    return Sizes(
        kind=family.kind,
        layers=whole_number(full, LAYERS[:2], None),
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
        mlp_bias=gpt2 or (model_type == "llama" and _truth(full, "mlp_bias", False)),
        head_norm=model_type == "qwen3",
        attention_dropout=bool(full.get("attn_pdrop" if gpt2 else "attention_dropout")),
        residual_dropout=bool(full.get("resid_pdrop")),
        embedding_dropout=bool(full.get("embd_pdrop")),
    )


def tensors_of(sizes: Sizes) -> tuple[Tensors, ...]:
    """Tensors of embedding, each layer, head (with the projection, even one that is tied)."""
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


CONFIG = "config.json"
_MOST_BYTES = 1 << 24


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of the model in ``folder``."""
    if not os.path.isdir(folder):  # False, too, of a name that is too long
        raise ModelError(
            f"model.path={folder}: no such folder. It must hold {CONFIG} and, unless "
            "model.pretrained=false, *.safetensors; nothing is downloaded. "
            "Try model.path=/models/my_llama."
        )
    file = folder / CONFIG
    try:
        found = read_json(file, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        raise ModelError(
            f"model.path={folder} has no {CONFIG}, so it is no model folder of the transformers "
            "library. Try the folder that save_pretrained() wrote."
        ) from None
    except (OSError, FileRefusedError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Try a fresh copy of it.") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ModelError(
            f"{file} names no model_type, so it does not say which architecture it is of. "
            'Try adding e.g. "model_type": "llama".'
        )
    _refuse(found, file)
    return found


def _refuse(config: Mapping[str, Any], file: Path) -> None:
    if "auto_map" in config:
        raise ModelError(
            f"{file} has auto_map: its network is Python code of its own, which is not run. "
            "Try a model whose architecture is part of the transformers library."
        )
    if "quantization_config" in config:
        raise ModelError(
            f"{file} has quantization_config: quantised weights cannot be trained. "
            "Try the unquantised model."
        )


# What configurations call the number of a layer's experts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def expert_count(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """The word for it and how many experts a layer has; None where none are named."""
    inner = config.get("ffn_config")  # where DBRX has it
    for place in (config, inner if isinstance(inner, dict) else {}):
        for name in _EXPERTS:
            value = place.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                return name, value
    return None


LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MOST_LAYERS, _MOST = 100_000, 2**40


def whole_number(config: Mapping[str, Any], names: Sequence[str], default: int | None) -> int:
    """A size, under the first of ``names`` that is there; null counts as not there.

    Raises:
        ModelError: It is missing without a default, no whole number >= 1, or more than any model's.
    """
    given = [(name, config[name]) for name in names if config.get(name) is not None]
    name, value = given[0] if given else (names[0], default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{CONFIG}: {name}={'missing' if value is None else value}: expected a whole number "
            f'>= 1. Try "{name}": 4.'
        )
    most = _MOST_LAYERS if name in LAYERS else _MOST
    if value > most:
        raise ModelError(f'{CONFIG}: {name}={value}: expected at most {most}. Try "{name}": 4.')
    return value


def _truth(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f'{CONFIG}: {name}={value}: expected true or false. Try "{name}": false.')
    return value
