"""Weights of a checkpoint under the names and in the layout of the transformers library."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from launcher.workloads.hf.counterpart import counterpart
from launcher.workloads.transformer_shape import UNIT_PREFIX, TransformerShape

_UNIT = re.compile(r"^network\.(embedding|layers\.\d+|head)\.")

_LLAMA_LAYER = {
    "attention.norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp.norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_GPT2_NORMS = {"attention.norm": "ln_1", "mlp.norm": "ln_2"}
# GPT-2 stores its matrices as [inputs, outputs].
_GPT2_MATRICES = {
    ("attention.query", "attention.key", "attention.value"): "attn.c_attn",
    ("attention.output",): "attn.c_proj",
    ("mlp.up",): "mlp.c_fc",
    ("mlp.down",): "mlp.c_proj",
}


def library_name(name: str) -> str:
    """The library's name of a parameter of ``HfLanguageModel``.

    >>> library_name("network.layers.3.model.layers.3.mlp.up_proj.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    return _UNIT.sub("", name)


def library_tensors(state: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """The weights of a checkpoint of ``model=hf``, as the library stores them.

    Args:
        state: The checkpoint's module state.
        tied: Whether the head shares the embedding's weight, which is stored once then.
    """
    found = {library_name(name): value for name, value in state.items()}
    if tied:
        found.pop("lm_head.weight", None)
    return found


def built_in_tensors(shape: TransformerShape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint of the built-in transformer, as Llama or GPT-2.

    Args:
        shape: Its shape.
        state: The checkpoint's module state.

    Raises:
        ModelError: Neither computes the same function.
    """
    own = {name.removeprefix(UNIT_PREFIX): value for name, value in state.items()}
    found = _gpt2(shape, own) if counterpart(shape) == "gpt2" else _llama(shape, own)
    if not shape.tie_embeddings:
        found["lm_head.weight"] = own["head.projection.weight"]
    return found


def _llama(shape: TransformerShape, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {
        "model.embed_tokens.weight": own["embedding.tokens.weight"],
        "model.norm.weight": own["head.norm.weight"],
    }
    for index in range(shape.layers):
        for ours, theirs in _LLAMA_LAYER.items():
            found[f"model.layers.{index}.{theirs}"] = own[f"layers.{index}.{ours}"]
    return found


def _gpt2(shape: TransformerShape, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {
        "transformer.wte.weight": own["embedding.tokens.weight"],
        "transformer.wpe.weight": own["embedding.positions"],
        "transformer.ln_f.weight": own["head.norm.weight"],
        "transformer.ln_f.bias": own["head.norm.bias"],
    }
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}.", f"transformer.h.{index}."
        for kind in ("weight", "bias"):
            for norm, name in _GPT2_NORMS.items():
                found[f"{theirs}{name}.{kind}"] = own[f"{ours}{norm}.{kind}"]
            for parts, name in _GPT2_MATRICES.items():
                # Outputs are the first extent of ours, and of a bias the only one.
                joined = torch.cat([own[f"{ours}{part}.{kind}"] for part in parts])
                found[f"{theirs}{name}.{kind}"] = joined.t() if kind == "weight" else joined
    return found
