"""A Hugging Face model as the parent process sees it: sizes and costs, from ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from launcher.workloads.hf.config_json import read_config, whole_number
from launcher.workloads.hf.families import Sizes, Tensors, count, read_sizes, tensors_of
from launcher.workloads.transformer_shape import UnitSpec
from strategies.errors import ModelError, PlanError

NETWORK = "network."
EMBEDDING = f"{NETWORK}embedding"
HEAD = f"{NETWORK}head"

# What says nothing about weights and may differ between a checkpoint and the folder.
_FREE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")


def layer_name(index: int) -> str:
    """The unit's name of a decoder layer inside the LightningModule."""
    return f"{NETWORK}layers.{index}"


@dataclass(frozen=True, slots=True)
class HfShape:
    """What the launcher knows of a Hugging Face model without importing it.

    Attributes:
        folder: Where ``config.json`` is, absolute.
        pretrained: Whether the weights are the folder's, or fresh ones.
        sequence: Tokens per sequence.
        layers_path: Where its list of decoder layers is, if the user said so.
        config: The content of ``config.json``.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        vocab: Token ids.
        sizes: All numbers, for the families that are known; None for others.
    """

    folder: str
    pretrained: bool
    sequence: int
    layers_path: str | None
    config: Mapping[str, Any] = field(hash=False)
    layers: int
    hidden: int
    vocab: int
    sizes: Sizes | None

    @property
    def model_type(self) -> str:
        """The family's name in the transformers library."""
        return str(self.config["model_type"])

    @property
    def num_parameters(self) -> int | None:
        """Parameters, tied ones once; None where only the ranks know."""
        return None if self.sizes is None else sum(unit.parameters for unit in self.unit_specs())

    @property
    def described(self) -> dict[str, Any]:
        """What a checkpoint says about its model."""
        return {"hf": {key: value for key, value in self.config.items() if key not in _FREE}}

    def tensors(self) -> tuple[Tensors, ...]:
        """Names and shapes of all tensors per unit; only for known families."""
        assert self.sizes is not None
        return tensors_of(self.sizes)

    def unit_specs(self) -> tuple[UnitSpec, ...]:
        """Embedding, each layer, head, in the terms of ``transformer_shape.UnitSpec``."""
        sizes = self.sizes
        assert sizes is not None
        tensors = self.tensors()
        boundary = self.sequence * sizes.hidden
        logits = self.sequence * sizes.vocab
        projection = sizes.vocab * sizes.hidden
        # Ids; positions are looked up, too, where they are learned.
        looked_up = self.sequence * len(tensors[0])
        dropped = boundary if sizes.embedding_dropout else 0
        embedding = UnitSpec(EMBEDDING, count(tensors[0]), 0, boundary, looked_up + dropped)
        layers = (
            UnitSpec(
                name=layer_name(index),
                parameters=count(held),
                forward_flops=_layer_flops(sizes, held, self.sequence),
                output_elements=boundary,
                saved_elements=_layer_saved(sizes, self.sequence),
            )
            for index, held in enumerate(tensors[1:-1])
        )
        head = UnitSpec(
            name=HEAD,
            parameters=count(tensors[-1]) - (projection if sizes.tied else 0),
            forward_flops=2 * self.sequence * projection,
            output_elements=logits,
            saved_elements=_norm_saved(sizes, self.sequence) + boundary + logits + self.sequence,
            tied_parameters=projection if sizes.tied else 0,
        )
        return (embedding, *layers, head)


def read_shape(
    path: str | None, *, pretrained: bool, sequence: int, layers_path: str | None
) -> HfShape:
    """The model in a folder.

    Args:
        path: ``model.path``.
        pretrained: ``model.pretrained``.
        sequence: ``model.sequence``.
        layers_path: ``model.layers_path``.

    Raises:
        ModelError: There is no folder, or its ``config.json`` cannot be used.
        PlanError: The sequence is longer than the model allows.
    """
    if path is None:
        raise ModelError(
            "model=hf needs the folder of a model: config.json and, unless model.pretrained=false, "
            "*.safetensors. Try model=hf model.path=/models/my_llama."
        )
    folder = Path(path).expanduser().absolute()
    config = read_config(folder)
    sizes = read_sizes(config)
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if sizes is not None and sizes.heads % sizes.kv_heads:
        raise ModelError(
            f"{folder}/config.json: num_attention_heads={sizes.heads} is not divisible by "
            f"num_key_value_heads={sizes.kv_heads}. "
            f'Try "num_key_value_heads": {sizes.heads}.'
        )
    limit = None if sizes is None else sizes.positions
    if sizes is None and config.get("max_position_embeddings") is not None:
        limit = whole_number(config, ("max_position_embeddings",), None)
    if limit is not None and sequence > limit:
        raise PlanError(
            f"model.sequence={sequence} is longer than the model's max_position_embeddings="
            f"{limit}. Try model.sequence={limit}."
        )
    return HfShape(
        folder=str(folder),
        pretrained=pretrained,
        sequence=sequence,
        layers_path=layers_path,
        config=config,
        layers=whole_number(config, names, 1) if sizes is None else sizes.layers,
        hidden=_first(config, ("hidden_size", "n_embd", "d_model")) if not sizes else sizes.hidden,
        vocab=whole_number(config, ("vocab_size",), sizes.vocab if sizes else None),
        sizes=sizes,
    )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return whole_number(config, names, 1)


def _layer_flops(sizes: Sizes, tensors: Tensors, sequence: int) -> int:
    matrices = sum(prod(shape) for shape in tensors.values() if len(shape) == 2)
    scores = 4 * sequence * sequence * sizes.heads * sizes.head_size
    return 2 * sequence * matrices + scores


def _norm_saved(sizes: Sizes, sequence: int) -> int:
    boundary = sequence * sizes.hidden
    return boundary + 2 * sequence if sizes.kind == "gpt2" else 2 * boundary + sequence


def _layer_saved(sizes: Sizes, sequence: int) -> int:
    """Elements that autograd keeps of one sequence, as in ``transformer_shape.unit_specs``.

    Constants that all layers of a rank share (rotary tables, masks) are left out. A window that
    hides tokens (sliding_window) keeps the repeated keys and values as well, which is not counted.
    """
    wide, narrow = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    normed_twice = 2 * sizes.hidden
    attention = wide + 2 * narrow + wide + sizes.heads
    if sizes.head_norm:
        # Both norms keep their input and the normalised value besides what attention keeps.
        attention += 2 * (wide + narrow) + sizes.heads + sizes.kv_heads
    if sizes.attention_dropout:
        # No fused kernel on CPUs: scores, what is dropped of them, and scaled queries and keys.
        attention += 3 * sizes.heads * sequence + 2 * wide - sizes.heads
    # gate, up, silu(gate), product; or what the formula of GELU's tanh form keeps on its way.
    inner = 4 if sizes.kind == "llama" else 5
    dropped = 2 * sizes.hidden if sizes.residual_dropout else 0
    per_token = normed_twice + attention + inner * sizes.ffn + dropped
    return sequence * per_token + 2 * _norm_saved(sizes, sequence)
