"""Layers that hold one rank's share of a weight, as plain tensors of the local size.

Their gradients, the optimizer's state and the buffers of ``grad_sync`` are then plain, too, and the
products inside them are ordinary nodes of the autograd graph, which a split backward can take
apart. Names stay those of the layers that they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.models.tensor_parallel.regions import (
    TIME,
    Entrance,
    gather_outputs,
    leave,
    split_stream,
)
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks


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
        outputs = self._entrance.linear(input, self.weight, self.bias)
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
        self.whole = False  # whether there is nothing to split for a while

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output if self.whole else split_stream(output, self._ranks)


class Turned:
    """A layer that has become another one in its place, with the hooks and the mode that it has.

    Whoever refers to the layer (a list, a second name, a forward that closes over it) finds the
    other one. Modules differ in nothing but their class and their attributes.
    """

    def __init__(self, layer: nn.Module, other: nn.Module) -> None:
        self._layer = layer
        common = nn.Module().__dict__.keys()
        self._kinds = type(layer), type(other)
        self._other = {key: v for key, v in other.__dict__.items() if key not in common}
        self._before = {key: v for key, v in layer.__dict__.items() if key in self._other}
        self.turn(back=False)

    def turn(self, *, back: bool) -> None:
        """Into the other layer, or into the one that it was."""
        for key in self._other:
            self._layer.__dict__.pop(key, None)
        self._layer.__dict__.update(self._before if back else self._other)
        self._layer.__class__ = self._kinds[not back]


# -- cross entropy and choice over logits that are cut along the vocabulary ------------------------
#
# No rank ever holds all logits: the forward exchanges three numbers per token, the backward none.

_IGNORED = -100  # the target that torch's cross entropy leaves out


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """Which token ids a rank's logits are for."""

    shard: Shard
    ranks: TensorRanks

    @property
    def first(self) -> int:
        """The id of the first column."""
        return self.shard.start(self.ranks.rank)

    @property
    def held(self) -> int:
        """Columns that are token ids; the rest is padding and never counts."""
        return self.shard.held(self.ranks.rank)


def token_losses(logits: Tensor, targets: Tensor, share: VocabularyShare | None) -> Tensor:
    """Negative log-probabilities ``[...]`` in at least float32, the same on every rank.

    Args:
        logits: ``[..., vocabulary]``, or this rank's share of them.
        targets: ``[...]``; 0 where they are -100.
        share: How the logits are cut; None where they are whole.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    if share is None:
        losses = functional.cross_entropy(wide, targets.flatten(), reduction="none")
    else:
        losses = _TokenLosses.apply(wide, targets.flatten(), share)  # type: ignore[no-untyped-call]
    return losses.view_as(targets)


def most_probable(logits: Tensor, share: VocabularyShare | None) -> Tensor:
    """The most probable token ids ``[...]``, the lowest among equals; arguments as above."""
    if share is None:
        return logits.argmax(dim=-1)
    held = logits[..., : share.held]
    if share.held:
        highest, columns = held.max(dim=-1)
        ids = columns + share.first
    else:
        highest = logits.new_full(logits.shape[:-1], -torch.inf)
        ids = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    winners = share.ranks.gather(highest).argmax(dim=0, keepdim=True)
    return share.ranks.gather(ids).gather(0, winners)[0]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, share: VocabularyShare) -> Tensor:
        held = logits[:, : share.held]
        highest = held.amax(dim=-1) if share.held else logits.new_full(targets.shape, -torch.inf)
        share.ranks.max_(highest)
        shifted = held - highest.unsqueeze(-1)
        columns = targets - share.first
        elsewhere = (columns < 0) | (columns >= share.held)
        columns = columns.masked_fill(elsewhere, 0).unsqueeze(-1)
        picked = torch.zeros_like(highest)
        if share.held:
            picked = shifted.gather(-1, columns).squeeze(-1).masked_fill(elsewhere, 0)
        exponentials = shifted.exp_()
        sums = share.ranks.sum_(torch.stack([exponentials.sum(dim=-1), picked]))
        ignored = targets == _IGNORED
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), columns, elsewhere, ignored)
        ctx.padding = logits.shape[-1] - share.held
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, columns, elsewhere, ignored = ctx.saved_tensors
        weights = gradient.masked_fill(ignored, 0).unsqueeze(-1)
        result = probabilities * weights
        if result.shape[-1]:
            result.scatter_add_(-1, columns, (-weights).masked_fill(elsewhere.unsqueeze(-1), 0))
        return functional.pad(result, (0, ctx.padding)), None, None
