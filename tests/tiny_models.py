"""Model folders as the transformers library writes them, small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from launcher.workloads.hf.hf_shape import HfShape, read_shape

VOCAB = 64
POSITIONS = 32
SEQUENCE = 12

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MORE: dict[str, dict[str, Any]] = {
    # Heads wider than hidden_size / num_attention_heads.
    "qwen3": {"head_dim": 12},
    "gpt2": {"n_inner": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "phi3": {"num_key_value_heads": 4},
}


def tiny_config(family: str, **changes: Any) -> Any:
    given = {**_SIZES, **_MORE.get(family, {}), **changes}
    if family == "gpt2":
        given.pop("num_key_value_heads")
        given.pop("intermediate_size")
    return AutoConfig.for_model(family, **given)


def write_model(
    folder: Path, family: str, *, shard: str = "1GB", **changes: Any
) -> PreTrainedModel:
    """Writes a model with random weights; returns it in double precision, not training."""
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
        for parameter in model.parameters():
            # Norms and biases, too, so that a forgotten one shows.
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shard)
    return model.double().eval()


def shape_of(folder: Path, **changes: Any) -> HfShape:
    given = {"pretrained": True, "sequence": SEQUENCE, "layers_path": None, **changes}
    return read_shape(str(folder), **given)


def batch_of(rows: int, *, padded: bool = False, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, SEQUENCE + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if padded:
        batch["attention_mask"] = torch.ones(rows, SEQUENCE, dtype=torch.int64)
        batch["attention_mask"][-1, SEQUENCE - 4 :] = 0
        batch["attention_mask"][0, :3] = 0
    return batch
