"""Where a stage's gradients lie: one behind the other in a buffer, or each for itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of such weights are summed, and in which they are updated."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass
class Buffer:
    """All gradients of one dtype of one stage that the same ranks hold."""

    layout: FlatLayout
    parameters: tuple[nn.Parameter, ...]  # whose gradients, in the order of the layout
    flat: Tensor  # the gradients, then the marks (unless sharded) and padding
    marks: Tensor  # one per parameter: not 0 if any member of the group has a gradient
    group: dist.ProcessGroup | None = None  # whom to reduce with; None for nobody
    sharded: bool = False  # whether each member gets the sum of its share only
    experts: bool = False  # whether these are spread over ranks
    loose: tuple[Loose, ...] = ()  # where the gradients are, if not in ``flat``

    def bucket(self, index: int) -> Tensor:
        bounds = self.layout.bounds
        return self.flat[bounds[index] : bounds[index + 1]]


@dataclass
class Share:
    """Where a parameter's gradient lies."""

    parameter: nn.Parameter
    view: Tensor
    buckets: tuple[int, ...]
    mark: Tensor
    grouped: bool  # whether others have gradients of it, too
    touched: bool = False

    @property
    def widened(self) -> bool:
        return self.view.dtype != self.parameter.dtype


@dataclass
class Loose:
    """The gradient of a parameter that nobody reduces."""

    parameter: nn.Parameter
    sum: Tensor | None = None  # as it was last taken; None before the first gradient

    def take(self) -> None:
        """Notes what autograd, or somebody else, has put there; nothing there changes nothing."""
        grad = self.parameter.grad
        if grad is None:
            return
        if grad.layout is not torch.strided:
            grad = self.parameter.grad = grad.to_dense()  # of an embedding; see ``main_optimizer``
        self.sum = grad


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Parts one behind the other, cut into equal buckets, each bucket into equal shares.

    A share of a bucket belongs to one member of the group, so a member owns a range per bucket and
    a part may belong to several of them. What does not divide is padded at the end.

    >>> layout = FlatLayout((5, 2), count=2, shares=2)
    >>> layout.bounds, layout.owned(1)
    ((0, 4, 8), ((2, 4), (6, 8)))
    >>> layout.pieces(0, 0), layout.pieces(0, 1), layout.pieces(1, 1)
    (((0, 2), (4, 5)), ((2, 4),), ((6, 7),))
    """

    sizes: tuple[int, ...]  # elements of each part
    count: int  # of buckets, >= 1
    shares: int = 1  # members of the group that share every bucket; 1 where nothing is shared
    # Elements behind all parts that belong to the last bucket, so that they move no other bucket's
    # end into a part that is ready later; only where nothing is shared.
    tail: int = 0

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bucket k is ``bounds[k]`` to ``bounds[k + 1]``; the last one is the buffer's length."""
        rows = -(-sum(self.sizes) // self.shares)
        bounds = [self.shares * (rows * k // self.count) for k in range(self.count + 1)]
        bounds[-1] += self.tail
        return tuple(bounds)

    def owned(self, member: int) -> tuple[tuple[int, int], ...]:
        """The member's (start, stop) in each bucket."""
        found = []
        for low, high in pairwise(self.bounds):
            share = (high - low) // self.shares
            found.append((low + member * share, low + (member + 1) * share))
        return tuple(found)

    def pieces(self, part: int, member: int) -> tuple[tuple[int, int], ...]:
        """What the member owns of a part: (start, stop) in the buffer, one per bucket it meets."""
        first = self.starts[part]
        last = first + self.sizes[part]
        cut = ((max(first, low), min(last, high)) for low, high in self.owned(member))
        return tuple((low, high) for low, high in cut if low < high)

    def buckets_of(self, start: int, stop: int) -> tuple[int, ...]:
        bounds = self.bounds
        return tuple(
            k for k in range(self.count) if max(bounds[k], start) < min(bounds[k + 1], stop)
        )
