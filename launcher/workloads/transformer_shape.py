"""The shape of a decoder-only transformer and what each of its units costs, as plain integers.

Free of torch, so that planning and validating never pay for its import. The torch model
(``transformer.py``) is built from the same shape, and the tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from strategies.errors import PlanError

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "gelu"]
Position = Literal["rope", "learned"]

# Units are named as they are inside ``LanguageModel``, where the network is the attribute ``net``.
UNIT_PREFIX = "net."


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

    def _check_heads(self) -> None:
        if self.hidden % self.heads:
            fit = max(1, round(self.hidden / self.heads)) * self.heads
            raise PlanError(
                f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}. "
                f"Try model.hidden={fit}."
            )
        if self.heads % self.kv_heads:
            most = min(self.kv_heads, self.heads)
            fit = max(n for n in range(1, most + 1) if self.heads % n == 0)
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


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What one unit costs; everything but the parameters is per sequence of full length.

    Attributes:
        name: The unit's module name inside ``LanguageModel``; never depends on a stage cut.
        parameters: Parameters that this unit owns.
        forward_flops: Matrix products only, two operations per multiply-add. Attention scores are
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
    for layer in range(shape.layers):
        units += [
            UnitSpec(
                name=f"{UNIT_PREFIX}layers.{layer}.attention",
                parameters=_attention_parameters(shape),
                forward_flops=_attention_flops(shape),
                output_elements=boundary,
                saved_elements=attention,
            ),
            UnitSpec(
                name=f"{UNIT_PREFIX}layers.{layer}.mlp",
                parameters=_mlp_parameters(shape),
                forward_flops=2 * tokens * _mlp_matrices(shape) * width * shape.ffn,
                output_elements=boundary,
                saved_elements=mlp,
            ),
        ]
    projection = shape.vocab * width
    units.append(
        UnitSpec(
            name=f"{UNIT_PREFIX}head",
            parameters=_norm_parameters(shape) + (0 if shape.tie_embeddings else projection),
            forward_flops=2 * tokens * projection,
            output_elements=tokens * shape.vocab,
            saved_elements=saved_by_norm + boundary + tokens * shape.vocab + tokens,
            tied_parameters=projection if shape.tie_embeddings else 0,
        )
    )
    return tuple(units)


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
