"""The ranks that share a stage's matrices, the collectives between them, and what each holds.

Every rank of such a group runs the same program on the same microbatches, so collectives meet in
the same order on all of them without further agreement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

if TYPE_CHECKING:
    from strategies.models.split_backward.pending import Meanwhile

# torch 2.13 renames ``all_gather_into_tensor`` and ``reduce_scatter_tensor``, and warns at the old
# names where the new ones exist.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


_LONGEST_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class SumShare:
    """A sum under way, of which this member gets a share.

    Attributes:
        work: Ends when ``share`` is there; None if it is.
        parts: What is added up; kept until the end.
    """

    work: dist.Work | None
    share: Tensor
    parts: Tensor | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.share


@dataclass(frozen=True, slots=True)
class GatherUnderWay:
    """All members' tensors on their way into ``stacked``; ``work`` is None if they are there."""

    work: dist.Work | None
    stacked: Tensor
    own: Tensor  # what is sent; kept until the end

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.stacked


class TensorRanks:
    """One tensor-parallel group, as one of its members sees it.

    Attributes:
        rank: This process in the group.
        size: Members, tp >= 2.
        sequence: Whether the stream between matrices is cut along the sequence.
        meanwhile: Weight gradients that may be computed while a collective is under way.
    """

    def __init__(self, group: dist.ProcessGroup, *, sequence: bool = False) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.sequence = sequence
        self.meanwhile: Meanwhile | None = None
        # Now: in a step its replicas pass for all processes, and each tp_rank's have another store.
        self._store: Store | None = _get_default_store()

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group

    def start_sum(self, tensor: Tensor) -> dist.Work:
        """Starts adding up in place, over all members; the tensor is contiguous."""
        work: dist.Work | None = dist.all_reduce(tensor, group=self._group, async_op=True)
        if work is None:
            raise RuntimeError("the sum over tensor-parallel ranks became synchronous")
        return work

    def sum_(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return tensor

    def broadcast_(self, tensor: Tensor) -> None:
        """Gives everybody the first member's values."""
        dist.broadcast(tensor, group=self._group, group_src=0)

    def told(self, text: str, wait_s: float = _LONGEST_SILENCE_S) -> list[str | None]:
        """What each member says, None of one that says nothing in that time.

        Not by a collective, where processes have a store: where one member has failed, others may
        still be in one.
        """
        if self._store is None:
            return list(self._gathered(text))
        members = "-".join(map(str, dist.get_process_group_ranks(self._group)))
        store = PrefixStore(f"told/{members}", self._store)
        # All members ask as often, over all groups that they have been in.
        number = store.add(str(self.rank), 1)
        store = PrefixStore(f"{number}", store)
        store.set(str(self.rank), text)
        return [self._answer(store, member, wait_s) for member in range(self.size)]

    def _gathered(self, text: str) -> Iterator[str]:
        """By a collective, as bytes: nothing that comes from outside is unpickled."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        longest = self.max_(torch.tensor(len(own)))
        padded = torch.zeros(int(longest), dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self._group)
        for each in found:
            yield bytes(each.tolist()).rstrip(b"\0").decode()

    @staticmethod
    def _answer(store: PrefixStore, member: int, wait_s: float) -> str | None:
        try:
            store.wait([str(member)], timedelta(seconds=wait_s))
        except dist.DistStoreError:
            return None
        return store.get(str(member)).decode()

    def gather(self, tensor: Tensor) -> Tensor:
        """All members' tensors of one shape, stacked: ``[size, *shape]``."""
        stacked = tensor.new_empty((self.size, *tensor.shape))
        self.gather_into(stacked, tensor.contiguous())
        return stacked

    def gather_into(self, stacked: Tensor, tensor: Tensor) -> None:
        """``gather`` into memory that is there, ``size`` times as large."""
        if self._by_host(tensor):
            # Gloo gathers host memory only.
            host = torch.empty(stacked.shape, dtype=stacked.dtype)
            all_gather_single(host.view(-1), tensor.cpu().view(-1), group=self._group)
            stacked.copy_(host)
            return
        all_gather_single(stacked.view(-1), tensor.view(-1), group=self._group)

    def start_gather(self, tensor: Tensor) -> GatherUnderWay:
        """Starts what ``gather`` does."""
        if self._by_host(tensor):
            return GatherUnderWay(None, self.gather(tensor), tensor)
        own = tensor.contiguous()
        stacked = own.new_empty((self.size, *own.shape))
        work = all_gather_single(stacked.view(-1), own.view(-1), group=self._group, async_op=True)
        return GatherUnderWay(work, stacked, own)

    def gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self.gather(tensor).unbind(0), dim)

    def share_along(self, tensor: Tensor, dim: int) -> Tensor:
        """This member's equal share of a tensor; a view."""
        width = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * width, width)

    def start_sum_share(self, tensor: Tensor, dim: int) -> SumShare:
        """Starts adding up over all members; each gets its share along ``dim``."""
        parts = torch.stack(tensor.chunk(self.size, dim))
        if self._by_host(parts):
            self.sum_(parts)
            return SumShare(None, parts[self.rank])
        share = torch.empty_like(parts[0])
        work = reduce_scatter_single(
            share.view(-1), parts.view(-1), group=self._group, async_op=True
        )
        return SumShare(work, share, parts)

    def _by_host(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and dist.get_backend(self._group) == "gloo"


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a whole tensor: equal shares along ``dim``, the last padded if need be.

    ``size`` is that dimension's in the whole tensor, without padding; ``parts`` counts the ranks.
    Of ``segments`` that lie side by side (queries, keys, values) a rank has a share of each; these
    come out even, and nothing is padded.
    """

    dim: int
    size: int
    parts: int
    segments: int = 1

    @property
    def width(self) -> int:
        """Size of a share along ``dim``, padding included."""
        return -(-self.size // self.parts)

    @property
    def padding(self) -> int:
        """What all shares together have more than the whole."""
        return self.width * self.parts - self.size

    def start(self, rank: int) -> int:
        """Where a rank's share begins in the whole; of several segments, where the first does."""
        if self.segments > 1:
            return rank * (self.width // self.segments)
        return min(rank * self.width, self.size)

    def held(self, rank: int) -> int:
        """How much of a rank's share is no padding."""
        if self.segments > 1:
            return self.width
        return min((rank + 1) * self.width, self.size) - self.start(rank)

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's share, a new tensor; padding is zero."""
        if self.segments > 1:
            apart = unflattened(whole, self.dim, self.segments, self.parts, -1)
            return apart.select(self.dim + 1, rank).flatten(self.dim, self.dim + 1).contiguous()
        held = whole.narrow(self.dim, self.start(rank), self.held(rank))
        return self._filled(held, rank)

    def unpadded(self, share: Tensor, rank: int) -> Tensor:
        """What a rank's share has of the whole; a view."""
        return share.narrow(self.dim, 0, self.held(rank))

    def padded(self, held: Tensor, rank: int) -> Tensor:
        """The inverse of ``unpadded``; padding is zero."""
        if held.shape[self.dim] == self.width:
            return held
        return self._filled(held, rank)

    def _filled(self, held: Tensor, rank: int) -> Tensor:
        shape = list(held.shape)
        shape[self.dim] = self.width
        share = torch.zeros(shape, dtype=held.dtype, device=held.device)
        self.unpadded(share, rank).copy_(held)
        return share

    def box(self, share: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of the whole, and where a share begins in it."""
        shape, offsets = list(share.shape), [0] * share.dim()
        shape[self.dim], offsets[self.dim] = self.size, self.start(rank)
        return tuple(shape), tuple(offsets)

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """The inverse of ``local``, from all ranks' shares in order."""
        if self.segments > 1:
            apart = [unflattened(share, self.dim, self.segments, -1) for share in shares]
            return torch.stack(apart, self.dim + 1).flatten(self.dim, self.dim + 2)
        return torch.cat(list(shares), self.dim).narrow(self.dim, 0, self.size)


@dataclass(frozen=True, slots=True)
class Grid:
    """A rank's part of a tensor that is cut along two dimensions, into shares that come out even.

    Rank r has share r // inner.parts of the first cut, and of that share r % inner.parts.
    """

    outer: Shard
    inner: Shard

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's share, a new tensor."""
        first, second = divmod(rank, self.inner.parts)
        return self.inner.local(self.outer.local(whole, first), second)

    def unpadded(self, share: Tensor, rank: int) -> Tensor:
        return share

    def padded(self, held: Tensor, rank: int) -> Tensor:
        return held

    def box(self, share: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of the whole, and where a share begins in it."""
        shape, offsets = list(share.shape), [0] * share.dim()
        for shard, own in zip(
            (self.outer, self.inner), divmod(rank, self.inner.parts), strict=True
        ):
            shape[shard.dim], offsets[shard.dim] = shard.size, shard.start(own)
        return tuple(shape), tuple(offsets)


def is_cut(shard: Shard | Grid | None) -> bool:
    """Whether ranks have other shares; a stack of experts may be in one piece."""
    return isinstance(shard, Grid) or (shard is not None and shard.parts > 1)


def unflattened(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """With several dimensions in the place of one; torch's own has no types."""
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
