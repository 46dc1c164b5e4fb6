"""A Hugging Face model as the parent process sees it: sizes and costs, from ``config.json``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from launcher.workloads.hf.families import (
    CONFIG,
    FAMILIES,
    LAYERS,
    Sizes,
    Tensors,
    count,
    expert_count,
    read_config,
    read_sizes,
    tensors_of,
    whole_number,
)
from launcher.workloads.hf.stored import match_tensors, stored_tensors
from launcher.workloads.transformer_shape import UnitSpec
from launcher.workloads.transformer_share import UnitShare, padded_vocab, refuse_ep, refuse_tp
from strategies.errors import CheckpointError, DataError, ModelError, PlanError, install_words

NETWORK = "network."
EMBEDDING = f"{NETWORK}embedding"
HEAD = f"{NETWORK}head"

# What says nothing about weights and may differ between a checkpoint and the folder.
_FREE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")


@dataclass(frozen=True, slots=True)
class HfShape:
    """What the launcher knows of a Hugging Face model without importing it."""

    folder: str  # where ``config.json`` is, absolute
    pretrained: bool  # whether the weights are the folder's, or fresh ones
    sequence: int
    layers_path: str | None  # of its list of decoder layers, if the user said so
    config: Mapping[str, Any] = field(hash=False)  # the content of ``config.json``
    layers: int
    hidden: int
    vocab: int
    sizes: Sizes | None  # None for families that are not known

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def num_parameters(self) -> int | None:
        """Parameters, tied ones once; None where only the ranks know."""
        return None if self.sizes is None else sum(unit.parameters for unit in self.unit_specs())

    @property
    def described(self) -> dict[str, Any]:
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
                name=f"{NETWORK}layers.{index}",
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
    """The model in a folder; the arguments are those of ``model``."""
    if path is None:
        raise ModelError(
            "model=hf needs the folder of a model: config.json and, unless model.pretrained=false, "
            "*.safetensors. Try model=hf model.path=/models/my_llama."
        )
    folder = Path(path).expanduser().absolute()
    config = read_config(folder)
    sizes = read_sizes(config)
    widths = ("hidden_size", "n_embd", "d_model")
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
        layers=whole_number(config, LAYERS, 1) if sizes is None else sizes.layers,
        hidden=whole_number(config, widths, 1) if sizes is None else sizes.hidden,
        vocab=whole_number(config, ("vocab_size",), sizes.vocab if sizes else None),
        sizes=sizes,
    )


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


# ------------------------------------------------------------------------------------------- share
# Layers are cut by the library's own plan (heads, inner width), or, of gpt2, as it is found, which
# comes to the same; embedding and head by token ids.


# Vectors that belong to the outputs of a matrix that is cut by them.
_CUT_BIASES = (
    "q_proj.bias", "k_proj.bias", "v_proj.bias", "gate_proj.bias", "up_proj.bias", "c_attn.bias",
    "c_fc.bias",
)  # fmt: skip


def check_hf_tp(shape: HfShape, tp: int, *, sequence_parallel: bool = False) -> None:
    """Refuses what the library's layers cannot be cut into."""
    if sequence_parallel:
        raise PlanError(
            "sequence_parallel=true: layers of the transformers library take the whole sequence. "
            f"Try tp={tp} sequence_parallel=false, or a built-in model."
        )
    if tp == 1 or shape.sizes is None:
        return
    if shape.sizes.kind == "gpt2":
        refuse_tp(tp, {"n_head": shape.sizes.heads, "n_inner": shape.sizes.ffn})
        return
    sizes = {
        "num_attention_heads": shape.sizes.heads,
        "num_key_value_heads": shape.sizes.kv_heads,
        "intermediate_size": shape.sizes.ffn,
    }
    refuse_tp(tp, sizes)


def check_hf_ep(shape: HfShape, ep: int) -> None:
    """Refuses what config.json says; whether experts are of a kind that can be spread, ranks see.

    Raises:
        PlanError: It names none, or they do not come out even.
    """
    found = expert_count(shape.config)
    if found is None:
        raise PlanError(
            f"ep={ep} spreads the experts of a model over ranks, and {shape.folder}/{CONFIG} "
            f"(model_type={shape.model_type}) names none. Try ep=1."
        )
    name, experts = found
    if experts % ep:
        refuse_ep(ep, experts, f"{name}={experts} of {shape.folder}/{CONFIG}")


def hf_shares(shape: HfShape, tp: int) -> tuple[UnitShare, ...]:
    """Embedding, each layer, head; for known families."""
    sizes = shape.sizes
    assert sizes is not None
    specs = shape.unit_specs()
    boundary = shape.sequence * sizes.hidden
    ids = padded_vocab(sizes.vocab, tp) // tp
    first, *layers, head = specs
    table = sizes.vocab * sizes.hidden
    # Positions of gpt2 are whole on every rank.
    own = first.parameters - table + ids * sizes.hidden
    found = [UnitShare(own, 0, first.output_elements, first.saved_elements, 1, 0)]
    for spec, tensors in zip(layers, shape.tensors()[1:-1], strict=True):
        cut = sum(
            prod(size)
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
    norm = count(shape.tensors()[-1]) - table
    found.append(
        UnitShare(
            parameters=norm + (0 if sizes.tied else ids * sizes.hidden),
            forward_flops=head.forward_flops / sizes.vocab * ids,
            output_elements=head.output_elements,
            saved_elements=head.saved_elements - logits + shape.sequence * ids,
            forward_sums=0,
            backward_sums=1,
        )
    )
    return tuple(found)


_MAJOR = 5


def require_transformers() -> None:
    """Refuses ``model=hf`` where the library is missing or too old."""
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "model=hf needs the transformers library, which is not installed. "
            f"Try {install_words('transformers')}."
        )
    found = version("transformers")
    if int(found.partition(".")[0]) < _MAJOR:
        raise ModelError(
            f"model=hf needs transformers >= {_MAJOR}, but {found} is installed. "
            f"Try {install_words('transformers')}."
        )


def check_folder(shape: HfShape) -> None:
    """Looks at the files of a model: all there, undamaged, and those that config.json asks for.

    For an architecture whose tensors are not known here, their names are checked on the ranks.
    """
    require_transformers()
    if not shape.pretrained:
        return
    folder = Path(shape.folder)
    stored = stored_tensors(folder)
    if shape.sizes is None:
        return
    expected = {name: size for unit in shape.tensors() for name, size in unit.items()}
    embedding = next(iter(expected))
    match_tensors(
        expected,
        stored,
        folder=folder,
        prefix=FAMILIES[shape.model_type].prefix,
        tied={"lm_head.weight": embedding} if shape.sizes.tied else {},
    )


def check_vocabulary(shape: HfShape, needed: int, data: str) -> None:
    """Refuses token ids that the model has no embedding for."""
    if needed > shape.vocab:
        raise DataError(
            f"{data} has token ids up to {needed - 1}, but the model in {shape.folder} has "
            f"vocab_size={shape.vocab} and allows 0 to {shape.vocab - 1}. "
            "Try the tokenizer of the model, data.tokenizer=.../tokenizer.json."
        )


def check_same_model(path: Path, written: Any, shape: HfShape) -> None:
    """Refuses a checkpoint that says (``written``) it is of another model than the folder's."""
    config = written.get("hf") if isinstance(written, dict) else None
    if not isinstance(config, dict) or "model_type" not in config:
        raise CheckpointError(
            f"{path} is no checkpoint of model=hf. Try the model= that it was written with."
        )
    now, then = _numbers(shape.config), _numbers(config)
    wrong = [key for key in now if now[key] != then.get(key)]
    if wrong:
        listed = ", ".join(f"{key}={then.get(key)} (here {now[key]})" for key in wrong)
        raise CheckpointError(
            f"{path} is a checkpoint of another model than model.path={shape.folder}: {listed}. "
            "Try the model.path that it was written with."
        )


def _numbers(config: Any) -> dict[str, Any]:
    """What decides the shapes of the weights."""
    sizes = read_sizes(config)
    found: dict[str, Any] = {"model_type": config["model_type"]}
    if sizes is None:
        names = ("num_hidden_layers", "n_layer", "hidden_size", "n_embd", "vocab_size")
        return found | {name: config[name] for name in names if name in config}
    # Dropout changes no weight, and only learned positions are weights.
    free = {"kind"} | ({"positions"} if sizes.kind == "llama" else set())
    for entry in fields(sizes):
        if entry.name not in free and not entry.name.endswith("_dropout"):
            found[entry.name] = getattr(sizes, entry.name)
    return found
