"""The built-in network: a decoder-only transformer as an ordered list of half-block units.

Every unit maps ``[batch, sequence, hidden]`` to the same shape, except the first (token ids in) and
the last (logits out). A unit holds its own normalisation and residual, so any cut between two units
sends exactly one tensor. Nothing here knows stages, ranks or Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.workloads.initialisation import SeededUnit
from launcher.workloads.transformer_shape import TransformerShape

_NORM_EPSILON = 1e-5
_EMBEDDING_DEVIATION = 0.02
_ROTARY_BASE = 10_000.0


class Embedding(SeededUnit):
    """Token ids ``[batch, sequence]`` to vectors ``[batch, sequence, hidden]``."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = (
            nn.Parameter(torch.empty(shape.sequence, shape.hidden))
            if shape.position == "learned"
            else None
        )
        self.dropout = nn.Dropout(shape.dropout)

    def initial(self, parameter: str) -> tuple[float, float]:
        return 0.0, _EMBEDDING_DEVIATION

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks the tokens up; ``sequence`` may be shorter than the shape's, never longer."""
        vectors: Tensor = self.tokens(tokens)
        if self.positions is not None:
            vectors = vectors + self.positions[: tokens.shape[-1]]
        dropped: Tensor = self.dropout(vectors)
        return dropped


class _HalfBlock(SeededUnit):
    """Norm, branch, dropout, residual; what attention and MLP have in common."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.dropout = nn.Dropout(shape.dropout)
        self._deviation = _small_deviation(shape)
        # The residual stream adds up 2 * layers branches.
        self._last_deviation = self._deviation / math.sqrt(2 * shape.layers)

    last = ""  # name of the linear layer that writes to the residual stream

    def initial(self, parameter: str) -> tuple[float, float]:
        """Norms start as identity, biases at 0, weights small."""
        if parameter.endswith("bias"):
            return 0.0, 0.0
        if parameter == "norm.weight":
            return 1.0, 0.0
        return 0.0, self._last_deviation if parameter == f"{self.last}.weight" else self._deviation


class Attention(_HalfBlock):
    """Causal self-attention with its norm and residual, ``[batch, sequence, hidden]`` both ways."""

    last = "output"

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        linear = partial(nn.Linear, bias=shape.biases)
        self.query = linear(shape.hidden, shape.hidden)
        self.key = linear(shape.hidden, shape.kv_hidden)
        self.value = linear(shape.hidden, shape.kv_hidden)
        self.output = linear(shape.hidden, shape.hidden)
        self._head_size = shape.head_size
        self._rotary = shape.position == "rope"

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.norm(stream)
        query, key, value = (
            self._split(part(normed)) for part in (self.query, self.key, self.value)
        )
        if self._rotary:
            cosines, sines = _rotary_constants(query)
            query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        branch = self.output(mixed.transpose(1, 2).flatten(2))
        return stream + self.dropout(branch)  # type: ignore[no-any-return]

    def _split(self, joined: Tensor) -> Tensor:
        # The number of heads follows from the width, so a shard of the heads works as well.
        heads = joined.view(*joined.shape[:-1], -1, self._head_size)
        return heads.transpose(1, 2)


class Mlp(_HalfBlock):
    """The MLP with its norm and residual, ``[batch, sequence, hidden]`` both ways."""

    last = "down"

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        linear = partial(nn.Linear, bias=shape.biases)
        self.gate = linear(shape.hidden, shape.ffn) if shape.activation == "swiglu" else None
        self.up = linear(shape.hidden, shape.ffn)
        self.down = linear(shape.ffn, shape.hidden)

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.norm(stream)
        inner = self.up(normed)
        if self.gate is not None:
            inner = functional.silu(self.gate(normed)) * inner
        else:
            inner = functional.gelu(inner, approximate="tanh")
        return stream + self.dropout(self.down(inner))  # type: ignore[no-any-return]


class Head(SeededUnit):
    """Final norm and projection to logits ``[batch, sequence, vocab]``."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.projection = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self._tied = shape.tie_embeddings
        self._deviation = _EMBEDDING_DEVIATION if self._tied else _small_deviation(shape)

    def initial(self, parameter: str) -> tuple[float, float]:
        """The norm starts as identity; a tied projection is drawn as the embedding is."""
        if parameter == "projection.weight":
            return 0.0, self._deviation
        return (0.0 if parameter.endswith("bias") else 1.0), 0.0

    def owner(self, unit_name: str, parameter: str) -> str:
        """A tied projection takes the embedding's numbers, also on a rank without that unit."""
        if self._tied and parameter == "projection.weight":
            return f"{unit_name.removesuffix('head')}embedding.tokens.weight"
        return super().owner(unit_name, parameter)

    def forward(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(stream))
        return logits


class Transformer(nn.Module):
    """All units of a shape. Weights are uninitialised: see ``initialise``."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(shape), "mlp": Mlp(shape)})
            for _ in range(shape.layers)
        )
        self.head = Head(shape)
        self._tied = shape.tie_embeddings
        self.tie()

    def tie(self) -> None:
        """Makes embedding and head share one parameter, if the shape asks for it.

        Nothing happens while only one of the two has real weights, or is here at all: a cut puts
        other modules in the places of units that live elsewhere.
        """
        ends = (self.embedding, self.head)
        if self._tied and isinstance(ends[0], Embedding) and isinstance(ends[1], Head):
            first, last = ends[0].tokens, ends[1].projection
            if first.weight.is_meta == last.weight.is_meta:
                last.weight = first.weight

    def named_units(self) -> Iterator[tuple[str, nn.Module]]:
        yield "embedding", self.embedding
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, nn.ModuleDict)
            for half in ("attention", "mlp"):
                yield f"layers.{index}.{half}", layer[half]
        yield "head", self.head

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``[batch, sequence]`` to logits ``[batch, sequence, vocab]``."""
        stream = tokens
        for _, unit in self.named_units():
            stream = unit(stream)
        return stream


def _norm(shape: TransformerShape) -> nn.Module:
    kind = nn.LayerNorm if shape.norm == "layernorm" else nn.RMSNorm
    return kind(shape.hidden, eps=_NORM_EPSILON)


def _small_deviation(shape: TransformerShape) -> float:
    # "SmallInit" of Nguyen and Salazar (arXiv 1910.05895): unlike a fixed 0.02 it suits narrow
    # models, which the laptop presets are, as well as wide ones.
    return math.sqrt(2 / (5 * shape.hidden))


def _rotary_constants(like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for the positions and the head size of ``like``.

    They are computed anew in every unit, which costs less than shipping or keeping them, and leaves
    nothing to restore when a unit is built on the meta device.

    Queries ``[batch, heads, sequence, head size]``, head size even, give two tensors
    ``[sequence, head size]`` in their dtype, worked out in at least float32.
    """
    sequence, size = like.shape[-2:]
    dtype = torch.promote_types(like.dtype, torch.float32)
    exponents = torch.arange(0, size, 2, dtype=dtype, device=like.device) / size
    positions = torch.arange(sequence, dtype=dtype, device=like.device)
    half = positions[:, None] * _ROTARY_BASE ** (-exponents)
    angles = torch.cat((half, half), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns ``heads`` ``[batch, heads, sequence, head size]``.

    Dimension i is paired with i + size/2 (not with i + 1), as in published LLaMA checkpoints for
    the transformers library, so weights need no permutation to be exchanged.
    """
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
