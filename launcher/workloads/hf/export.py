"""A checkpoint as a Hugging Face folder, from whichever kind of model."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from launcher.workloads.hf.counterpart import config_of, counterpart
from launcher.workloads.hf.families import CONFIG
from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.hf.skeleton import build_skeleton
from launcher.workloads.hf.stored import SINGLE
from launcher.workloads.hf.weights import as_stored
from launcher.workloads.model_share import ModelShape
from launcher.workloads.transformer_shape import UNIT_PREFIX, TransformerShape
from strategies.errors import CheckpointError
from strategies.runtime.lightning.checkpoints.rank_folder import load_state_dict
from strategies.runtime.lightning.checkpoints.stock_file import unwritten_export


def export_checkpoint(checkpoint: Path, shape: ModelShape, target: Path) -> None:
    """Writes the weights of a checkpoint for transformers, in the type they were trained in.

    Raises:
        CheckpointError: It is damaged, or has no weights.
        ModelError: The built-in transformer has a shape that the library lacks.
        RunError: The folder cannot be written.
    """
    state = load_state_dict(checkpoint)
    types = {str(value.dtype).removeprefix("torch.") for value in state.values()}
    floating = sorted(name for name in types if "float" in name)
    if not floating:
        raise CheckpointError(
            f"{checkpoint} has no weights to export.", fix="Use another checkpoint."
        )
    if isinstance(shape, HfShape):
        folder = Path(shape.folder)
        config = {k: v for k, v in shape.config.items() if k != "torch_dtype"}
        companions = [folder / name for name in _COMPANIONS if (folder / name).is_file()]
        tensors = as_stored(
            build_skeleton(shape), {library_name(name): value for name, value in state.items()}
        )
        write_folder(target, config | {"dtype": floating[0]}, tensors, companions=companions)
        return
    write_folder(target, config_of(shape, floating[0]), _built_in_tensors(shape, state))


# What belongs to a model besides its weights: text in, text out.
_COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
    "merges.txt",
)  # fmt: skip


def write_folder(
    target: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    companions: Sequence[Path] = (),
) -> None:
    """Writes beside ``target``, an empty folder or none, syncs, and renames.

    The ``tensors`` are under the library's names; ``companions`` are copied along.

    Raises:
        RunError: It cannot be written; nothing is left behind.
    """
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        staging.mkdir(parents=True)
        for file in companions:
            shutil.copyfile(file, staging / file.name)
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # Two names must not share memory there.
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        save_file(plain, staging / SINGLE, metadata={"format": "pt"})
        for file in (*staging.iterdir(), staging):
            _sync(file)
        os.rename(staging, target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise unwritten_export(error, target) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def _built_in_tensors(shape: TransformerShape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
            if shape.moe is None or not theirs.startswith("mlp."):
                found[f"model.layers.{index}.{theirs}"] = own[f"layers.{index}.{ours}"]
        if shape.moe is not None:
            found |= _mixtral_experts(f"layers.{index}.", own)
    return found


def _mixtral_experts(layer: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The hub has a matrix per expert."""
    mixture, block = f"{layer}mlp.mixture.", f"model.{layer}block_sparse_moe."
    found = {f"{block}gate.weight": own[f"{mixture}router.weight"]}
    for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
        for expert, matrix in enumerate(own[f"{mixture}experts.{ours}"]):
            found[f"{block}experts.{expert}.{theirs}.weight"] = matrix
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
