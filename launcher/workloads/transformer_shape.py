"""The shape of a decoder-only transformer and what each of its units costs, as plain integers.

Free of torch, so that planning and validating never pay for its import. The torch model
(``transformer.py``) is built from the same shape, and the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from strategies.errors import PlanError

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "gelu"]
Position = Literal["rope", "learned"]
Scores = Literal["softmax", "sigmoid"]
Span = Literal["sequence", "microbatch"]

# Units are named as they are inside ``LanguageModel``, where the network is the attribute ``net``.
UNIT_PREFIX = "net."

_NUM_LOSSES = 2  # of ``strategies.models.experts.Routing``, per sequence


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A mixture of experts in place of an MLP; experts have no biases.

    Raises:
        PlanError: A size out of range, an unknown word, or sizes that do not fit together.
    """

    experts: int  # routed ones per layer
    per_token: int  # of them, each token's
    ffn: int  # inner width of one expert
    shared: int = 0  # experts that every token goes to, computed as one MLP
    first_dense: int = 0  # layers at the beginning that keep their MLP
    every: int = 1  # of the others, each so manyth has experts, the last of the group
    scores: Scores = "softmax"  # of a router; ``sigmoid`` scores each expert by itself
    normalised: bool = True  # whether the weights of a token's experts sum to 1
    scale: float = 1.0  # factor of these weights
    steering: float = 0.0  # by how much a step moves the bias of a choice; 0 has no bias
    balance_loss: float = 0.0  # factor of the balance loss of each layer
    balance_over: Span = "sequence"  # what it is taken over
    z_loss: float = 0.0  # factor of the z-loss of each layer

    def __post_init__(self) -> None:
        for name in ("experts", "per_token", "ffn", "every"):
            _check_positive(_MOE_KEYS.get(name, name), getattr(self, name))
        if self.per_token > self.experts:
            raise PlanError(
                f"model.experts_per_token={self.per_token} is more than there are experts "
                f"(model.experts={self.experts}). Try model.experts_per_token={self.experts}."
            )
        _check_word("router", self.scores, get_args(Scores))
        _check_word("aux_loss_over", self.balance_over, get_args(Span))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in the place of its MLP."""
        beyond = layer - self.first_dense
        return beyond >= 0 and beyond % self.every == self.every - 1


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Everything that decides the parameters of a decoder-only transformer.

    Linear layers have biases exactly where ``norm="layernorm"`` (the GPT family) and none with
    ``rmsnorm`` (the LLaMA family); the projection to the vocabulary never has one.

    Raises:
        PlanError: A size that is not positive, an unknown word, or sizes that do not fit together.
    """

    layers: int  # blocks of one attention and one MLP half-block each
    hidden: int  # width of the residual stream
    heads: int  # query heads; each is ``hidden / heads`` wide
    kv_heads: int  # key and value heads; fewer than ``heads`` means grouped-query attention
    ffn: int  # inner width of the MLP
    vocab: int  # number of token ids
    sequence: int  # longest sequence in tokens
    norm: Norm = "rmsnorm"  # in front of each half-block and of the head
    activation: Activation = "swiglu"  # three weight matrices; ``gelu`` (tanh form) has two
    position: Position = "rope"  # turns queries and keys; ``learned`` adds a vector per position
    tie_embeddings: bool = False  # the head projects with the embedding's own weight
    # Probability on the embedding and on both residual branches, not on attention probabilities,
    # which would force attention off the fused kernels.
    dropout: float = 0.0
    moe: MoeShape | None = None  # None: every layer has an MLP

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"):
            _check_positive(name, getattr(self, name))
        for name, words in (("norm", Norm), ("activation", Activation), ("position", Position)):
            _check_word(name, getattr(self, name), get_args(words))
        if not 0 <= self.dropout < 1:
            raise PlanError(
                f"model.dropout={self.dropout} is no probability in [0, 1). Try model.dropout=0.1."
            )
        self._check_heads()
        if self.moe is not None and not self.moe_layers:
            moe = self.moe
            raise PlanError(
                f"model.experts={moe.experts}: none of model.layers={self.layers} has experts with "
                f"model.first_dense_layers={moe.first_dense} model.expert_every={moe.every}. Try "
                + (
                    f"model.first_dense_layers={self.layers - moe.every}."
                    if self.layers >= moe.every
                    else f"model.first_dense_layers=0 model.expert_every={self.layers}."
                )
            )

    def _check_heads(self) -> None:
        most = min(self.kv_heads, self.heads)
        fit = max(n for n in range(1, most + 1) if self.heads % n == 0)
        if self.hidden % self.heads:
            step = self.heads * (2 if self.position == "rope" else 1)
            also = "" if fit == self.kv_heads else f" model.kv_heads={fit}"
            raise PlanError(
                f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}. "
                f"Try model.hidden={max(1, round(self.hidden / step)) * step}{also}."
            )
        if self.heads % self.kv_heads:
            raise PlanError(
                f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}. "
                f"Try model.kv_heads={fit}."
            )
        if self.position == "rope" and self.head_size % 2:
            raise PlanError(
                f"model.position=rope turns pairs of numbers, but a head is model.hidden / "
                f"model.heads = {self.head_size} wide, which is odd. "
                f"Try model.hidden={self.heads * (self.head_size + 1)}."
            )

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_hidden(self) -> int:
        """Width of all key heads together, equal to that of the value heads."""
        return self.kv_heads * self.head_size

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers that have experts in the place of an MLP."""
        return () if self.moe is None else _moe_layers(self.moe, self.layers)

    @property
    def biases(self) -> bool:
        return self.norm == "layernorm"

    @property
    def num_units(self) -> int:
        """Units that a pipeline may cut between: embedding, two per layer, head."""
        return 2 * self.layers + 2

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return sum(unit.parameters for unit in unit_specs(self))

    @property
    def active_parameters(self) -> int:
        """Of them those that one token meets: of experts the ones that it goes to."""
        moe = self.moe
        if moe is None:
            return self.num_parameters
        idle = (moe.experts - moe.per_token) * _mlp_matrices(self) * self.hidden * moe.ffn
        return self.num_parameters - len(self.moe_layers) * idle


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What one unit costs; everything but the parameters is per sequence of full length.

    Attributes:
        name: The unit's module name inside ``LanguageModel``; never depends on a stage cut.
        parameters: Parameters that this unit owns.
        forward_flops: Matrix products only, two operations per multiply-add; of experts those that
            a token goes to, which is what it computes with. Attention scores are
            counted in full although half of them are masked, as ``torch.utils.flop_counter``
            counts scaled_dot_product_attention; a causal kernel may skip up to half of that part.
        output_elements: Elements that cross a cut behind this unit; logits for the head.
        saved_elements: Elements that autograd keeps from the forward to the backward pass, tensors
            sharing one storage counted once, parameters not at all. See ``unit_specs``.
        tied_parameters: Parameters owned by another unit that this one needs a copy of when a cut
            separates the two.
    """

    name: str
    parameters: int
    forward_flops: int
    output_elements: int
    saved_elements: int
    tied_parameters: int = 0


@lru_cache(maxsize=64)
def _moe_layers(moe: MoeShape, layers: int) -> tuple[int, ...]:
    return tuple(n for n in range(layers) if moe.has_experts(n))


def unit_specs(shape: TransformerShape, *, fused_norm: bool = False) -> tuple[UnitSpec, ...]:
    """The units of ``shape`` in execution order: embedding, attention and MLP per layer, head.

    ``saved_elements`` follows what torch 2.13 saves in eager mode for one sequence in one dtype;
    the tests compare it with saved-tensor hooks on the real model and demand equality. It holds
    for the fused attention kernels (output and log-sum-exp are kept, scores are not). Rotary
    constants belong to a microbatch, so larger microbatches save slightly less per sequence. The
    head's share includes the loss: one log-probability per vocabulary entry and the targets. Token
    ids are elements like any other although they take 8 bytes. In bfloat16 the loss works in
    float32, so its share takes twice the bytes.

    Args:
        shape: The model.
        fused_norm: RMSNorm as one kernel (GPUs), which keeps its input and one number per token.
            The default is the composite one of CPUs, which keeps the normalised input, too.
    """
    tokens, width = shape.sequence, shape.hidden
    boundary = tokens * width
    dropped = boundary if shape.dropout else 0
    units = [
        UnitSpec(
            name=f"{UNIT_PREFIX}embedding",
            parameters=(shape.vocab + (tokens if shape.position == "learned" else 0)) * width,
            forward_flops=0,
            output_elements=boundary,
            saved_elements=tokens + dropped,
        )
    ]
    saved_by_norm = _saved_by_norm(shape, fused_norm=fused_norm)
    attention = _attention_saved(shape) + saved_by_norm + dropped
    mlp = _mlp_saved(shape) + saved_by_norm + dropped
    along = 0  # of losses and loads, beside the stream
    for layer in range(shape.layers):
        sparse = layer in shape.moe_layers
        before, along = along, along + _added_along(shape, along) if sparse else along
        units += [
            UnitSpec(
                name=f"{UNIT_PREFIX}layers.{layer}.attention",
                parameters=_attention_parameters(shape),
                forward_flops=_attention_flops(shape),
                output_elements=boundary + before,
                saved_elements=attention,
            ),
            UnitSpec(
                name=f"{UNIT_PREFIX}layers.{layer}.mlp",
                parameters=_sparse_parameters(shape) if sparse else _mlp_parameters(shape),
                forward_flops=_sparse_flops(shape)
                if sparse
                else 2 * tokens * _mlp_matrices(shape) * width * shape.ffn,
                output_elements=boundary + along,
                saved_elements=_sparse_saved(shape) + saved_by_norm + dropped if sparse else mlp,
            ),
        ]
    projection = shape.vocab * width
    units.append(
        UnitSpec(
            name=f"{UNIT_PREFIX}head",
            parameters=_norm_parameters(shape) + (0 if shape.tie_embeddings else projection),
            forward_flops=2 * tokens * projection,
            output_elements=tokens * shape.vocab + along,
            saved_elements=saved_by_norm + boundary + tokens * shape.vocab + tokens,
            tied_parameters=projection if shape.tie_embeddings else 0,
        )
    )
    return tuple(units)


def shape_keys(described: Mapping[str, Any]) -> dict[str, Any]:
    """A shape as ``asdict`` describes it under the names of ``model.*``, those of experts, too.

    Without experts there are no keys about them but ``experts``, which is None.
    """
    own = {name: value for name, value in described.items() if name != "moe"}
    moe = described.get("moe") or {"experts": None}
    return own | {_MOE_KEYS.get(name, name): value for name, value in moe.items()}


_MOE_KEYS = {
    "per_token": "experts_per_token",
    "ffn": "expert_ffn",
    "shared": "shared_experts",
    "first_dense": "first_dense_layers",
    "every": "expert_every",
    "scores": "router",
    "normalised": "router_normalized",
    "scale": "router_scale",
    "steering": "bias_update_rate",
    "balance_loss": "aux_loss",
    "balance_over": "aux_loss_over",
}


def unit_costs(shape: TransformerShape) -> tuple[float, ...]:
    """Relative forward cost of each unit, > 0: its FLOPs, and at least one per output element.

    The embedding multiplies nothing, but it moves a whole boundary tensor.
    """
    return tuple(float(max(u.forward_flops, u.output_elements)) for u in unit_specs(shape))


def _norm_parameters(shape: TransformerShape) -> int:
    return shape.hidden * (2 if shape.norm == "layernorm" else 1)


def _attention_parameters(shape: TransformerShape) -> int:
    width, narrow = shape.hidden, shape.kv_hidden
    biases = 2 * width + 2 * narrow if shape.biases else 0
    return 2 * width * width + 2 * width * narrow + biases + _norm_parameters(shape)


def _mlp_matrices(shape: TransformerShape) -> int:
    return 3 if shape.activation == "swiglu" else 2


def _mlp_parameters(shape: TransformerShape) -> int:
    matrices = _mlp_matrices(shape)
    biases = (matrices - 1) * shape.ffn + shape.hidden if shape.biases else 0
    return matrices * shape.hidden * shape.ffn + biases + _norm_parameters(shape)


def _sparse_parameters(shape: TransformerShape) -> int:
    moe = shape.moe
    assert moe is not None
    matrices = _mlp_matrices(shape) * moe.ffn * (moe.experts + moe.shared)
    bias = moe.experts if moe.steering else 0
    return shape.hidden * (moe.experts + matrices) + bias + _norm_parameters(shape)


def _sparse_flops(shape: TransformerShape) -> int:
    """Of the router, of the experts that a token goes to, and of the shared ones."""
    moe = shape.moe
    assert moe is not None
    matrices = _mlp_matrices(shape) * moe.ffn * (moe.per_token + moe.shared)
    return 2 * shape.sequence * shape.hidden * (moe.experts + matrices)


def _added_along(shape: TransformerShape, along: int) -> int:
    """Elements that a layer of experts adds to what travels: its load, the first two losses."""
    assert shape.moe is not None
    return shape.moe.experts + (0 if along else _NUM_LOSSES)


def _sparse_saved(shape: TransformerShape) -> int:
    moe = shape.moe
    assert moe is not None
    # swiglu: gate, up, silu(gate), product; gelu: its input and its output.
    inner = (4 if shape.activation == "swiglu" else 2) * moe.ffn
    # Scores, logits and their log-sum-exp; ids and weights of the choice.
    routing = 2 * moe.experts + 1 + 2 * moe.per_token
    if moe.normalised:  # the weights before, and their sum
        routing += moe.per_token + 1
    if moe.scores == "sigmoid":  # sum of the scores
        routing += 1
    # Rows of the experts' input, of their output, and where they came from and go to.
    rows = moe.per_token * (2 * shape.hidden + 2 + inner)
    per_token = shape.hidden + routing + rows + moe.shared * inner
    load = moe.experts * (2 if moe.steering else 1)
    return shape.sequence * per_token + load


def _attention_flops(shape: TransformerShape) -> int:
    tokens, width = shape.sequence, shape.hidden
    projections = 2 * tokens * width * (2 * width + 2 * shape.kv_hidden)
    return projections + 4 * tokens * tokens * width  # scores, then their sum over the values


def _saved_by_norm(shape: TransformerShape, *, fused_norm: bool) -> int:
    boundary = shape.sequence * shape.hidden
    if shape.norm == "layernorm":
        return boundary + 2 * shape.sequence  # input, mean, reciprocal deviation
    return boundary * (1 if fused_norm else 2) + shape.sequence


def _attention_saved(shape: TransformerShape) -> int:
    tokens = shape.sequence
    normed_query_output = 3 * shape.hidden
    per_token = normed_query_output + 2 * shape.kv_hidden + shape.heads  # log-sum-exp per head
    constants = 2 * shape.head_size if shape.position == "rope" else 0
    return tokens * (per_token + constants)


def _mlp_saved(shape: TransformerShape) -> int:
    # swiglu: gate, up, silu(gate), product; gelu: its input and its output.
    inner = 4 if shape.activation == "swiglu" else 2
    return shape.sequence * (shape.hidden + inner * shape.ffn)


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"model.{name}={value} is no whole number >= 1. Try model.{name}=4.")


def _check_word(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        choices = " or ".join(f"model.{name}={word}" for word in words)
        raise PlanError(f"model.{name}={value} is unknown. Try {choices}.")
