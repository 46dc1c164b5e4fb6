"""Gradients in contiguous memory, reduced bucket by bucket while the backward still runs.

One flat buffer per stage and dtype holds all gradients of the stage; a bucket is an equal share of
it, so the number of buckets depends on the stage's size alone and the program can be compiled
without the model. Parameters lie in reverse order: the last layers' gradients, ready first, come
first. ``parameter.grad`` is a view, so accumulation over microbatches costs no copy, and a bucket
is reduced in place, asynchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Launched = Callable[[int, int, dist.Work | None], None]


@dataclass
class _Buffer:
    """All gradients of one dtype of one stage."""

    flat: Tensor
    bounds: tuple[int, ...]  # bucket k is flat[bounds[k]:bounds[k + 1]]
    gradients: Tensor  # the part of flat before the marks

    def bucket(self, index: int) -> Tensor:
        return self.flat[self.bounds[index] : self.bounds[index + 1]]


@dataclass
class _Share:
    """Where a parameter's gradient lies."""

    parameter: nn.Parameter
    view: Tensor
    buckets: tuple[int, ...]
    mark: Tensor  # one element of the buffer: not 0 if any member of the group has a gradient
    touched: bool = False


@dataclass
class StageGradients:
    """The gradient buffer of one stage on one rank.

    Attributes:
        stage: Global stage index.
        group: Owners x dp; None when there is nobody to reduce with.
        count: Number of buckets.
    """

    stage: int
    group: dist.ProcessGroup | None
    count: int
    _buffers: list[_Buffer] = field(default_factory=list)
    _shares: list[_Share] = field(default_factory=list)
    _pending: list[int] = field(default_factory=list)
    _next: int = 0
    _armed: bool = False
    _works: list[dist.Work] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)
    _launched: Launched | None = None

    @classmethod
    def build(
        cls,
        stage: int,
        parameters: Sequence[nn.Parameter],
        *,
        count: int,
        group: dist.ProcessGroup | None,
        launched: Launched | None = None,
    ) -> StageGradients:
        """Lays out the buffers and hooks the parameters.

        Args:
            stage: Global stage index.
            parameters: Those that are trained, in forward order.
            count: Number of buckets, >= 1.
            group: Whom to reduce with.
            launched: Called when a bucket's reduction starts.
        """
        gradients = cls(stage, group, count, _launched=launched)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in reversed(parameters):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, members in by_dtype.items():
            sizes = [parameter.numel() for parameter in members]
            whole = sum(sizes)
            # A mark per parameter stands behind the gradients and is reduced with them, so that
            # all replicas agree on which parameters no step has used.
            flat = torch.zeros(whole + len(sizes), dtype=dtype, device=members[0].device)
            bounds = tuple(len(flat) * k // count for k in range(count + 1))
            gradients._buffers.append(_Buffer(flat, bounds, flat[:whole]))
            start = 0
            for index, (parameter, size) in enumerate(zip(members, sizes, strict=True)):
                view = flat[start : start + size].view_as(parameter)
                place = whole + index
                covered = {
                    k
                    for k in range(count)
                    if (bounds[k] < start + size and start < bounds[k + 1])
                    or bounds[k] <= place < bounds[k + 1]
                }
                mark = flat[place : place + 1]
                share = _Share(parameter, view, tuple(sorted(covered)), mark)
                gradients._shares.append(share)
                hooked: Any = parameter  # The hook's registration is untyped in torch.
                handle = hooked.register_post_accumulate_grad_hook(gradients._hook(share))
                gradients._handles.append(handle)
                start += size
        return gradients

    def _hook(self, share: _Share) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            grad = parameter.grad
            if grad is not None and grad.data_ptr() != share.view.data_ptr():
                # Autograd put a tensor of its own there: it holds the old sum and the new gradient.
                share.view.copy_(grad)
                parameter.grad = share.view
            if not share.touched:
                share.touched = True
                share.mark.fill_(1)
            if self._armed:
                for bucket in share.buckets:
                    self._pending[bucket] -= 1
                self._launch_ready()

        return ready

    def attach(self, *, zero: bool) -> None:
        """Points every ``parameter.grad`` into the buffer, cleared if ``zero``."""
        if zero:
            for buffer in self._buffers:
                buffer.flat.zero_()
        for share in self._shares:
            share.touched = share.touched and not zero
            share.parameter.grad = share.view

    def detach(self) -> None:
        """Takes the gradients away from the parameters; the buffer keeps them."""
        for share in self._shares:
            share.parameter.grad = None

    def arm(self, awaited: Iterable[Tensor] | None = None) -> None:
        """The next backward of this stage is its last: buckets may go as they get ready.

        Args:
            awaited: Parameters that it will touch; None for all. The others are ready now.
        """
        self._armed = True
        self._next = 0
        self._pending = [0] * self.count
        wanted = None if awaited is None else {id(parameter) for parameter in awaited}
        for share in self._shares:
            for bucket in share.buckets:
                self._pending[bucket] += wanted is None or id(share.parameter) in wanted
        if wanted is not None:
            self._launch_ready()

    def reduce(self, bucket: int) -> None:
        """The program's REDUCE: starts the bucket unless it has started inside the backward."""
        if not self._armed:
            self.arm()
        while self._next <= bucket:
            self._launch()

    def _launch_ready(self) -> None:
        # In bucket order only: every rank of the group must start the same one.
        while self._next < self.count and self._pending[self._next] <= 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self._next
        self._next += 1
        work: dist.Work | None = None
        if self.group is not None:
            for buffer in self._buffers:
                work = dist.all_reduce(buffer.bucket(bucket), group=self.group, async_op=True)
                if work is None:
                    raise RuntimeError("the reduction became synchronous")
                self._works.append(work)
        if self._launched is not None:
            self._launched(self.stage, bucket, work)

    def wait(self) -> None:
        """Returns when all started reductions have ended."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._armed = False
        for share in self._shares:
            # Optimizers skip None, but decay a weight whose gradient is zero.
            if not share.touched and (self.group is None or not share.mark.item()):
                share.parameter.grad = None

    def remove_hooks(self) -> None:
        """Leaves the parameters alone from now on."""
        for handle in self._handles:
            handle.remove()
        self.detach()

    def squared_norm(self) -> Tensor:
        """Sum of squares of the stage's gradient, a float64 scalar."""
        total = torch.zeros((), dtype=torch.float64)
        for buffer in self._buffers:
            norm = torch.linalg.vector_norm(buffer.gradients)
            total = total + norm.double().square().cpu()
        return total


def clip_(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scales gradients by limit / norm where that is below one, as torch's own clipping does."""
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device, parameter.grad.dtype))
