"""The built-in network: a decoder-only transformer as an ordered list of half-block units.

Every unit maps ``[batch, sequence, hidden]`` to the same shape, except the first (token ids in) and
the last (logits out). A unit holds its own normalisation and residual, so any cut between two units
sends exactly one tensor. Nothing here knows stages, ranks or Lightning.

With experts two small tensors travel beside the stream from the first layer that has some: the sum
of the layers' losses ``[batch, 2]`` and their loads ``[batch, layers so far, experts]``. Units
without experts hand them on as they are.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.workloads.transformer_shape import TransformerShape
from strategies.models.experts import Experts, Mixture, Router

# --------------------------------------------------------------------------------------------------
# Initial weights that do not depend on how a model is cut, sharded or placed.
#
# Every parameter has a generator of its own, seeded by the global seed, its unit's name and its own
# name. So a unit gets the same weights whether it is built alone on the last of eight ranks or with
# all the others on one.


class SeededUnit(nn.Module, ABC):
    """A unit that knows the initial distribution of each of its parameters."""

    @abstractmethod
    def initial(self, parameter: str) -> tuple[float, float]:
        """Mean and standard deviation of the normal distribution of one parameter."""

    def owner(self, unit_name: str, parameter: str) -> str:
        """The global name that seeds a parameter; another unit's for a tied one."""
        return f"{unit_name}.{parameter}"

    def slices(self, parameter: str) -> range | None:
        """What a parameter's first dimension counts, where its slices are drawn one by one.

        A rank that holds some of them then draws what the others' numbers leave alone.
        """
        return None


def initialise(
    unit_name: str, module: SeededUnit, seed: int, *, device: torch.device | str = "cpu"
) -> None:
    """Gives ``module`` its initial weights, in place, without touching the global generators.

    Values are drawn on the CPU in float32 and then converted, so all dtypes and devices start from
    the same numbers. Parameters on the meta device become real ones on ``device``. Peak extra
    memory is one parameter. The unit's name is that in the whole model, e.g. ``net.layers.3.mlp``.
    """
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            parameter = _materialise(module, name, device)
        mean, deviation = module.initial(name)
        if deviation == 0.0:
            nn.init.constant_(parameter, mean)
            continue
        owner, slices = module.owner(unit_name, name), module.slices(name)
        places = (
            [(owner, parameter)]
            if slices is None
            else [(f"{owner}.{n}", part) for n, part in zip(slices, parameter, strict=True)]
        )
        with torch.no_grad():
            for seeded, place in places:
                place.copy_(_draw(seeded, place.shape, seed).mul_(deviation).add_(mean))


def _draw(name: str, shape: torch.Size, seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(derived_seed(seed, name))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _materialise(module: nn.Module, name: str, device: torch.device | str) -> nn.Parameter:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    meta = owner.get_parameter(leaf)
    real = nn.Parameter(torch.empty_like(meta, device=device), requires_grad=meta.requires_grad)
    setattr(owner, leaf, real)
    return real


def derived_seed(seed: int, name: str) -> int:
    """A 64-bit signed seed from the run's seed and the name of what it is for.

    A hash, not Python's ``hash``: the latter differs between processes.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


# --------------------------------------------------------------------------------------------------
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

    def forward(self, stream: Tensor, *along: Tensor) -> Tensor | tuple[Tensor, ...]:
        normed = self.norm(stream)
        query, key, value = (
            self._split(part(normed)) for part in (self.query, self.key, self.value)
        )
        if self._rotary:
            cosines, sines = _rotary_constants(query)
            query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
        grouped = query.shape[1] != key.shape[1]
        if grouped and query.is_cuda and query.dtype == torch.float32:
            # Of the kernels for 32 bits the only one that takes fewer keys than queries writes all
            # scores: 20 GB for the memory of a row of docs/evidence/gpu.md.
            times = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
            grouped = False
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped
        )
        branch = self.output(mixed.transpose(1, 2).flatten(2))
        return _handed_on(stream + self.dropout(branch), along)

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

    def forward(self, stream: Tensor, *along: Tensor) -> Tensor | tuple[Tensor, ...]:
        inner = _activated(self.norm(stream), self.up, self.gate)
        return _handed_on(stream + self.dropout(self.down(inner)), along)


class SparseMlp(_HalfBlock):
    """Experts in the place of an MLP, with its norm and residual, and the shared ones if any."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        moe = shape.moe
        assert moe is not None
        self.mixture = Mixture(
            Router(
                experts=moe.experts,
                per_token=moe.per_token,
                hidden=shape.hidden,
                scores=moe.scores,
                normalised=moe.normalised,
                scale=moe.scale,
                steered=moe.steering > 0,
                span=moe.balance_over,
            ),
            Experts(
                experts=moe.experts,
                hidden=shape.hidden,
                inner=moe.ffn,
                gated=shape.activation == "swiglu",
            ),
        )
        self.shared = _Shared(shape, moe.shared * moe.ffn) if moe.shared else None

    def initial(self, parameter: str) -> tuple[float, float]:
        """As in an MLP, whose matrix to the residual stream each expert has for itself."""
        if parameter in ("mixture.experts.down", "shared.down.weight"):
            return 0.0, self._last_deviation
        return super().initial(parameter)

    def slices(self, parameter: str) -> range | None:
        """Every expert is drawn by its number."""
        if not parameter.startswith("mixture.experts."):
            return None
        experts = self.mixture.experts
        return range(experts.first, experts.first + len(experts.up))

    def forward(
        self, stream: Tensor, losses: Tensor | None = None, load: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stream, sum of the losses and loads of the layers so far; see the module docstring."""
        normed = self.norm(stream)
        mixed, routing = self.mixture(normed, self.shared)
        own = routing.load[:, None]
        return (
            stream + self.dropout(mixed),
            routing.losses if losses is None else losses + routing.losses,
            own if load is None else torch.cat((load, own), dim=1),
        )


class _Shared(nn.Module):
    """Experts that every token goes to, side by side in one MLP."""

    def __init__(self, shape: TransformerShape, inner: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.gate = linear(shape.hidden, inner) if shape.activation == "swiglu" else None
        self.up = linear(shape.hidden, inner)
        self.down = linear(inner, shape.hidden)

    def forward(self, normed: Tensor) -> Tensor:
        branch: Tensor = self.down(_activated(normed, self.up, self.gate))
        return branch


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

    def forward(self, stream: Tensor, *along: Tensor) -> Tensor | tuple[Tensor, ...]:
        return _handed_on(self.projection(self.norm(stream)), along)


class Transformer(nn.Module):
    """All units of a shape. Weights are uninitialised: see ``initialise``."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": Attention(shape),
                    "mlp": SparseMlp(shape) if layer in shape.moe_layers else Mlp(shape),
                }
            )
            for layer in range(shape.layers)
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
        tensors = (tokens,)
        for _, unit in self.named_units():
            made = unit(*tensors)
            tensors = made if isinstance(made, tuple) else (made,)
        return tensors[0]


def _handed_on(made: Tensor, along: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return (made, *along) if along else made


def _activated(normed: Tensor, up: nn.Module, gate: nn.Module | None) -> Tensor:
    inner: Tensor = up(normed)
    if gate is not None:
        return functional.silu(gate(normed)) * inner
    return functional.gelu(inner, approximate="tanh")


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
