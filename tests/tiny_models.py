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
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_MORE: dict[str, dict[str, Any]] = {
    # Heads wider than hidden_size / num_attention_heads.
    "qwen3": {"head_dim": 12},
    "gpt2": {"n_inner": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "phi3": {"num_key_value_heads": 4},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local", "global"], 1]]},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": POSITIONS, "rotary_dim": 4},
    "glm4": {"head_dim": 8},
    "exaone4": {"head_dim": 8, "sliding_window": 4},
    "mamba": {"state_size": 4},
    "gpt_oss": {**_EXPERTS, "head_dim": 8, "sliding_window": 4},
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "granitemoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "minimax": {**_EXPERTS, "head_dim": 8, "block_size": 4},
    "minimax_m2": {**_EXPERTS, "head_dim": 8},
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "glm4_moe": {
        **_EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    "hunyuan_v1_moe": {**_EXPERTS, "head_dim": 8, "moe_topk": 2},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": POSITIONS,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2,
        },
    },
    "jamba": {
        **_EXPERTS, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "llama4_text": {
        **_EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
    },
    "deepseek_v2": {
        **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "deepseek_v3": {
        **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip
# Those whose configuration has other words for sizes, and takes no others.
_OTHER_WORDS = {
    "gpt2": ("num_key_value_heads", "intermediate_size"),
    "gpt_neo": ("num_hidden_layers",),
    "dbrx": (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "intermediate_size", "max_position_embeddings",
    ),
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    given = {**_SIZES, **_MORE.get(family, {}), **changes}
    for word in _OTHER_WORDS.get(family, ()):
        given.pop(word)
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
    if "num_experts_per_tok" in _MORE.get(family, {}):
        # As a group torch multiplies them in shorter types alone.
        model.set_experts_implementation("eager")
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
