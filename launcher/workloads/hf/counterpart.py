"""The built-in transformer as a ``config.json`` of the transformers library. Torch-free."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from launcher.config import LaunchConfig
from launcher.config.key import spell
from launcher.workloads.transformer_shape import TransformerShape, shape_keys
from strategies.errors import ModelError, PlanError

Counterpart = Literal["llama", "gpt2", "mixtral"]
ExportFormat = Literal["huggingface", "safetensors", "ckpt"]

_EPSILON = 1e-5  # of every norm of the built-in transformer
_ROPE_BASE = 10_000.0
_PARTS: dict[Counterpart, dict[str, str]] = {
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"},
    "gpt2": {"norm": "layernorm", "activation": "gelu", "position": "learned"},
}
_TITLE: dict[Counterpart, str] = {"llama": "Llama", "gpt2": "GPT-2"}
# What a Mixtral is, as fields of a MoeShape.
_MIXTRAL = {"shared": 0, "first_dense": 0, "every": 1, "scores": "softmax", "normalised": True,
            "scale": 1.0, "steering": 0.0}  # fmt: skip


def counterpart(shape: TransformerShape) -> Counterpart:
    """Which architecture of the library computes the same function.

    Raises:
        ModelError: None does; the message says what stands in the way.
    """
    if shape.moe is not None:
        return _with_experts(shape)
    wrong = {family: _differences(shape, family) for family in _PARTS}
    family = min(wrong, key=lambda name: len(wrong[name]))
    if wrong[family]:
        reasons, fixes = zip(*wrong[family], strict=True)
        raise ModelError(
            f"mode=export: {' and '.join(reasons)}, and no other architecture of the "
            "transformers library comes closer. Exported are models with model.norm=rmsnorm "
            "model.activation=swiglu model.position=rope (as Llama), or model.norm=layernorm "
            "model.activation=gelu model.position=learned model.kv_heads=null (as GPT-2). "
            f"Try {' '.join(fixes)}, and train anew."
        )
    return family


def _with_experts(shape: TransformerShape) -> Counterpart:
    """A Mixtral is a Llama with experts in every layer."""
    wanted = shape_keys({**_PARTS["llama"], "moe": _MIXTRAL})
    own = shape_keys(asdict(shape))
    wrong = {name: value for name, value in wanted.items() if own[name] != value}
    if wrong:
        asked = " ".join(f"model.{name}={spell(own[name])}" for name in wrong)
        fix = " ".join(f"model.{name}={spell(value)}" for name, value in wrong.items())
        raise ModelError(
            f"mode=export: {asked} has no counterpart in the transformers library, where models "
            f"with experts are exported as Mixtral ({fix}). Try export.format=safetensors."
        )
    return "mixtral"


def config_of(shape: TransformerShape, dtype: str) -> dict[str, Any]:
    """The content of ``config.json`` for weights of type ``dtype``, e.g. ``float32``."""
    family = counterpart(shape)
    common: dict[str, Any] = {
        "model_type": family,
        "dtype": dtype,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tie_embeddings,
        # Our data have no tokens for beginning and end.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": shape.hidden,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": shape.ffn,
            "n_positions": shape.sequence,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": _EPSILON,
            "embd_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            "attn_pdrop": 0.0,
        }
    moe = shape.moe
    own: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "mlp_bias": False,
    }
    if moe is not None:
        own = {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.per_token,
            "output_router_logits": moe.balance_loss > 0,
            # Of one loss of all layers, per_token when balanced; ours are 1 in each layer.
            "router_aux_loss_coef": moe.balance_loss * shape.layers / moe.per_token,
            "sliding_window": None,
        }
    return (
        common
        | own
        | {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn if moe is None else moe.ffn,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_size,
            "max_position_embeddings": shape.sequence,
            "hidden_act": "silu",
            "rms_norm_eps": _EPSILON,
            "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_BASE},
            "rope_theta": _ROPE_BASE,  # for versions of the library before 5
            "attention_bias": False,
            "attention_dropout": 0.0,
        }
    )


def _differences(shape: TransformerShape, family: Counterpart) -> list[tuple[str, str]]:
    """What an architecture lacks, and the option that it has instead."""
    found = []
    for name, word in _PARTS[family].items():
        own = getattr(shape, name)
        if own != word:
            reason = f"model.{name}={own} has no counterpart in {_TITLE[family]} (which has {word})"
            found.append((reason, f"model.{name}={word}"))
    if family == "gpt2" and shape.kv_heads != shape.heads:
        reason = (
            f"model.kv_heads={shape.kv_heads} has no counterpart in GPT-2 (which has as many as "
            f"model.heads={shape.heads})"
        )
        found.append((reason, "model.kv_heads=null"))
    return found


_SUFFIXES: dict[ExportFormat, str] = {"safetensors": ".safetensors", "ckpt": ".ckpt"}


def export_format(config: LaunchConfig, *, described: bool) -> ExportFormat:
    """What ``mode=export`` writes; ``described`` models can go into a folder for transformers."""
    asked = config.export.format
    if asked is not None:
        return asked
    end = Path(config.export.path or "").suffix
    named = next((kind for kind, suffix in _SUFFIXES.items() if suffix == end), None)
    return named or ("huggingface" if described else "safetensors")


def export_target(config: LaunchConfig, run_dir: Path, kind: ExportFormat) -> Path:
    asked = config.export.path
    if asked is not None:
        return Path(asked).expanduser().absolute()
    return run_dir / f"export{_SUFFIXES.get(kind, '')}"


def check_destination(folder: Path) -> None:
    """Refuses to write over anything."""
    if folder.is_dir() and not any(folder.iterdir()) and folder.suffix not in _SUFFIXES.values():
        return
    if folder.exists() or folder.is_symlink():
        raise PlanError(
            f"export.path={folder} exists and is never overwritten. Try another export.path, or "
            "without it: each run has a folder of its own."
        )
