"""Layers that hold one rank's share of a weight, as plain tensors of the local size.

Their gradients, the optimizer's state and the buffers of ``grad_sync`` are then plain, too, and the
products inside them are ordinary nodes of the autograd graph, which a split backward can take
apart. Names stay those of the layers that they stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.runtime.tensor_parallel.ranks import TensorRanks
from strategies.runtime.tensor_parallel.regions import (
    TIME,
    Entrance,
    gather_outputs,
    leave,
    split_stream,
)
from strategies.runtime.tensor_parallel.shard import Shard
from strategies.runtime.tensor_parallel.vocabulary import VocabularyShare


class ColumnLinear(nn.Linear):
    """Some of a linear layer's outputs.

    Args:
        weight: ``[local outputs, inputs]``.
        bias: ``[local outputs]``.
        entrance: The unit's.
        gathered: Whom to gather all outputs from; None leaves them where they are.
        vocabulary: Which token ids the outputs are, for a head.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        entrance: Entrance,
        gathered: TensorRanks | None = None,
        vocabulary: VocabularyShare | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)
        self._entrance = entrance
        self._gathered = gathered
        self.vocabulary = vocabulary

    def forward(self, input: Tensor) -> Tensor:
        """``[..., inputs]`` to ``[..., local outputs]``, or to all of them."""
        outputs = functional.linear(self._entrance(input), self.weight, self.bias)
        return outputs if self._gathered is None else gather_outputs(outputs, self._gathered)


class RowLinear(nn.Linear):
    """A linear layer from some of its inputs; the bias is added once, to the sum.

    Args:
        weight: ``[outputs, local inputs]``.
        bias: ``[outputs]``, whole.
        ranks: Whom to add up with.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, ranks: TensorRanks
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)
        self._ranks = ranks

    def forward(self, input: Tensor) -> Tensor:
        """``[..., local inputs]`` to ``[..., outputs]``."""
        total = leave(functional.linear(input, self.weight), self._ranks)
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Embedding):
    """The vectors of some token ids; others come from the ranks that have them.

    Args:
        weight: ``[local ids, hidden]``.
        shard: How the table is cut.
        ranks: Whom to add up with.
        padding: The id whose vector gets no gradient; None if all do.
    """

    def __init__(
        self, weight: nn.Parameter, *, shard: Shard, ranks: TensorRanks, padding: int | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        own = None if padding is None else padding - shard.start(ranks.rank)
        self.padding_idx = own if own is not None and 0 <= own < shard.held(ranks.rank) else None
        self.max_norm = None
        self.norm_type = 2.0
        self.scale_grad_by_freq = False
        self.sparse = False
        self.weight = weight
        self._first = shard.start(ranks.rank)
        self._held = shard.held(ranks.rank)
        self._ranks = ranks

    def forward(self, input: Tensor) -> Tensor:
        """Ids ``[...]`` to vectors ``[..., hidden]``, whole on every rank."""
        ids = input - self._first
        elsewhere = (ids < 0) | (ids >= self._held)
        vectors = functional.embedding(
            ids.masked_fill(elsewhere, 0), self.weight, padding_idx=self.padding_idx
        )
        own = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        return leave(own, self._ranks, whole=True)


class SequenceDropout(nn.Dropout):
    """Dropout on a share of the sequence that drops what dropout on the whole would."""

    def __init__(self, probability: float, *, ranks: TensorRanks) -> None:
        super().__init__(probability)
        self._ranks = ranks

    def forward(self, input: Tensor) -> Tensor:
        """The mask is drawn for the whole sequence, on every rank alike."""
        if not self.training or self.p == 0:
            return input
        shape = list(input.shape)
        shape[TIME] *= self._ranks.size
        ones = torch.ones(shape, dtype=input.dtype, device=input.device)
        mask = functional.dropout(ones, self.p, training=True)
        # A view would keep the whole mask until the backward.
        return input * self._ranks.share_along(mask, TIME).clone()


class SplitOutput:
    """A forward hook: from here on each rank has its share of the sequence."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        """Cuts the module's output."""
        return split_stream(output, self._ranks)


def become(layer: nn.Module, other: nn.Module) -> None:
    """Turns a layer into another one in its place, with the hooks and the mode that it has.

    Whoever refers to the layer (a list, a second name, a forward that closes over it) finds the
    other one. Modules differ in nothing but their class and their attributes.
    """
    common = nn.Module().__dict__.keys() - {"_parameters"}
    own = {key: value for key, value in other.__dict__.items() if key not in common}
    layer.__class__ = type(other)
    layer.__dict__.update(own)
