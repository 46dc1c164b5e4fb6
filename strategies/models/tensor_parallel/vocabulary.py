"""Cross entropy and choice over logits that are cut along the vocabulary.

No rank ever holds all logits: the forward exchanges three numbers per token, the backward none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks

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
