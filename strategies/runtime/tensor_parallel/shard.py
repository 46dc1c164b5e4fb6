"""Which part of a whole tensor a tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Equal shares along one dimension; where they do not come out even, the last are padded.

    Attributes:
        dim: The dimension that is cut.
        size: Its size in the whole tensor, without padding.
        parts: Ranks.
    """

    dim: int
    size: int
    parts: int

    @property
    def width(self) -> int:
        """Size of a share along ``dim``, padding included."""
        return -(-self.size // self.parts)

    @property
    def padding(self) -> int:
        """What all shares together have more than the whole."""
        return self.width * self.parts - self.size

    def start(self, rank: int) -> int:
        """Where a rank's share begins in the whole."""
        return min(rank * self.width, self.size)

    def held(self, rank: int) -> int:
        """How much of a rank's share is no padding."""
        return min((rank + 1) * self.width, self.size) - self.start(rank)

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's share, a new tensor; padding is zero."""
        part = whole.narrow(self.dim, self.start(rank), self.held(rank))
        shape = list(whole.shape)
        shape[self.dim] = self.width
        share = torch.zeros(shape, dtype=whole.dtype, device=whole.device)
        share.narrow(self.dim, 0, self.held(rank)).copy_(part)
        return share

    def unpadded(self, share: Tensor, rank: int) -> Tensor:
        """What a rank's share has of the whole; a view."""
        return share.narrow(self.dim, 0, self.held(rank))

    def padded(self, held: Tensor, rank: int) -> Tensor:
        """The inverse of ``unpadded``; padding is zero."""
        if held.shape[self.dim] == self.width:
            return held
        shape = list(held.shape)
        shape[self.dim] = self.width
        share = torch.zeros(shape, dtype=held.dtype, device=held.device)
        self.unpadded(share, rank).copy_(held)
        return share

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """The inverse of ``local``, from all ranks' shares in order."""
        return torch.cat(list(shares), self.dim).narrow(self.dim, 0, self.size)
