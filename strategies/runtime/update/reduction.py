"""One bucket on its way through the reduction group: started at once, never waited for inline.

gloo's own reduce-scatter moves as many bytes as its all-reduce. Here it is an all-to-all, (n-1)/n
of the bucket per member, and the owner's sum in the order of the members: bitwise repeatable, and
in the gradient's own type even where a shorter one travels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from strategies.errors import PlanError
from strategies.models.tensor_parallel.tensor_ranks import all_gather_single, reduce_scatter_single
from strategies.rules import check_collectives


@dataclass
class Reduction:
    """A started reduction."""

    work: dist.Work  # ends when the data has arrived
    _result: Callable[[], object] | None = None
    _sent: Tensor | None = None  # A backend may not keep what it still reads.

    def arrived(self) -> bool:
        """Whether ``finish`` would not wait."""
        return bool(self.work.is_completed())

    def finish(self) -> None:
        """Waits; the result is in its place then. Once."""
        self.work.wait()
        if self._result is not None:
            self._result()


def start_all_reduce(
    bucket: Tensor, group: dist.ProcessGroup, *, wire: torch.dtype | None = None
) -> Reduction:
    """Sums a bucket over the group, in place; all members call it.

    The bucket is left alone until ``finish``; it travels in type ``wire``, None for its own.
    """
    if wire is None or wire == bucket.dtype:
        return Reduction(_asynchronous(dist.all_reduce(bucket, group=group, async_op=True)))
    sent = bucket.to(wire)
    work = _asynchronous(dist.all_reduce(sent, group=group, async_op=True))
    return Reduction(work, lambda: bucket.copy_(sent))


def start_reduce_scatter(
    bucket: Tensor, group: dist.ProcessGroup, *, wire: torch.dtype | None = None
) -> Reduction:
    """Sums a bucket over the group; each member's share of it ends up summed, the rest undefined.

    As ``start_all_reduce``; the bucket's length is a multiple of the group's size.
    """
    members = group.size()
    own = bucket.chunk(members)[group.rank()]
    sent = bucket if wire is None else bucket.to(wire)
    if dist.get_backend(group) == "nccl":
        received = own if sent is bucket else torch.empty_like(sent.chunk(members)[0])
        work = _asynchronous(reduce_scatter_single(received, sent, group=group, async_op=True))
        return Reduction(work, None if received is own else lambda: own.copy_(received), sent)
    if bucket.is_cuda:
        # On a GPU gloo has no all-to-all.
        return start_all_reduce(bucket, group, wire=wire)
    received = torch.empty_like(sent)
    work = _asynchronous(dist.all_to_all_single(received, sent, group=group, async_op=True))
    parts = received.view(members, -1)
    return Reduction(work, lambda: torch.sum(parts, dim=0, dtype=own.dtype, out=own), sent)


def start_gather(flat: Tensor, group: dist.ProcessGroup) -> tuple[list[dist.Work], Tensor | None]:
    """Gives every member all shares of ``flat``, of which each has its own.

    Args:
        flat: Its length is a multiple of the group's size. Nobody may touch it until all the
            returned works have ended.
        group: All members call this.

    Returns:
        (works, what the backend reads besides: to be kept until the compute stream has waited).
    """
    shares = list(flat.chunk(group.size()))
    if flat.is_cuda and dist.get_backend(group) != "nccl":
        # On a GPU gloo has broadcasts, but no all-gather.
        return [
            _asynchronous(dist.broadcast(share, group=group, group_src=source, async_op=True))
            for source, share in enumerate(shares)
        ], None
    own = shares[group.rank()].clone()
    return [_asynchronous(all_gather_single(flat, own, group=group, async_op=True))], own


def _asynchronous(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("the reduction became synchronous")
    return work


# -------------------------------------------------------------------------------------- asynchrony
# A reduction that waits inside its call stands in the backward it was to hide under, and nothing in
# its result tells: the run is only slow. Torch's own ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` does that
# to every collective.


_PATIENCE_S = 30.0  # how long the last member waits for word of a call that takes microseconds


def check_asynchronous(
    group: dist.ProcessGroup,
    members: Sequence[int],
    start: Callable[[Tensor], Reduction],
    device: torch.device,
    *,
    patience_s: float = _PATIENCE_S,
) -> None:
    """Starts a small reduction on all members but the last, which joins when it hears of them.

    If the call waited for the last member, that one would wait for word in vain. Collective over
    the group; its members' clocks do not matter.

    Raises:
        PlanError: A reduction has become synchronous; the last member sees it.
    """
    check_collectives(os.environ)
    probe = torch.zeros(len(members), device=device)
    # From here on everybody is there.
    dist.all_reduce(probe, group=group)
    probe.cpu()
    store = PrefixStore(f"asynchronous/{group.group_name}", _get_default_store())
    *others, last = members
    if dist.get_rank() != last:
        reduction = start(probe)
        store.set(str(dist.get_rank()), "started")
    else:
        try:
            store.wait([str(member) for member in others], timedelta(seconds=patience_s))
        except dist.DistStoreError as error:
            raise PlanError(
                "a gradient reduction that was started did not return before all its members had "
                "come: it would run in the backward instead of under it. Look for settings that "
                "make collectives wait (CUDA_LAUNCH_BLOCKING), or try overlap=none."
            ) from error
        reduction = start(probe)
    reduction.finish()
