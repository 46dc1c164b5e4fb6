"""Where parameters, buckets and replicas' shares lie in one flat buffer; arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Parts one behind the other, cut into equal buckets, each bucket into equal shares.

    A share of a bucket belongs to one member of the group, so a member owns a range per bucket and
    a part may belong to several of them. What does not divide is padded at the end.

    Attributes:
        sizes: Elements of each part.
        count: Number of buckets, >= 1.
        shares: Members of the group that share every bucket; 1 where nothing is shared.
        tail: Elements behind all parts that belong to the last bucket, so that they move no other
            bucket's end into a part that is ready later; only where nothing is shared.

    >>> layout = FlatLayout((5, 2), count=2, shares=2)
    >>> layout.bounds, layout.owned(1)
    ((0, 4, 8), ((2, 4), (6, 8)))
    >>> layout.pieces(0, 0), layout.pieces(0, 1), layout.pieces(1, 1)
    (((0, 2), (4, 5)), ((2, 4),), ((6, 7),))
    """

    sizes: tuple[int, ...]
    count: int
    shares: int = 1
    tail: int = 0

    @property
    def starts(self) -> tuple[int, ...]:
        """First element of each part."""
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
        bounds = self.bounds
        found = []
        for low, high in pairwise(bounds):
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
        """The buckets that hold anything of a range."""
        bounds = self.bounds
        return tuple(
            k for k in range(self.count) if max(bounds[k], start) < min(bounds[k + 1], stop)
        )
