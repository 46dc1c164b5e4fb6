"""Gradients in contiguous memory, reduced bucket by bucket while the backward still runs.

One flat buffer per stage and dtype holds all gradients of the stage; a bucket is an equal share of
it, so the number of buckets depends on the stage's size alone and the program can be compiled
without the model. Parameters lie in reverse order: the last layers' gradients, ready first, come
first. ``parameter.grad`` is a view, so accumulation over microbatches costs no copy, and a bucket
is reduced in place, asynchronously.

Gradients of 16-bit weights are summed in 32 bits: the buffer is wider than the parameter, whose own
``grad`` holds one microbatch's gradient until its hook has added it. ``narrow`` ones are summed in
16, and become 32 when the optimizer is about to read them.

Gradients that nobody reduces lie where autograd makes them, as without a pipeline: a sum that
begins with the first tensor and not with zeros takes less time, and no parameter needs a hook.

With sharded weights (``weight_shards``) a bucket is reduced and scattered: each member of the group
ends up with the sum of its share alone.

Experts have buffers of their own, because fewer ranks hold the same of them; a bucket is then a
share of each buffer, and each goes to its own group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from strategies.runtime.update.gradient_layout import (
    Buffer,
    FlatLayout,
    Loose,
    Share,
    main_dtype,
)
from strategies.runtime.update.reduction import Reduction, start_all_reduce, start_reduce_scatter

Launched = Callable[[int, int, dist.Work | None], None]
Noted = Callable[[int, int, Sequence[Tensor]], None]


@dataclass
class StageGradients:
    """The gradient buffer of one stage on one rank."""

    stage: int
    group: dist.ProcessGroup | None  # owners x dp; None when there is nobody to reduce with
    count: int  # of buckets; 0 where nobody reduces
    wire: torch.dtype | None = None  # type in which gradients travel; None for their own
    narrow: bool = False  # whether gradients are summed in the weights' own type
    buffers: list[Buffer] = field(default_factory=list)  # one per type of parameter
    # By the id of a parameter that the optimizer does not update itself: what it updates instead,
    # with the part of the buffer that is its gradient.
    targets: dict[int, list[tuple[nn.Parameter, Tensor]]] = field(default_factory=dict)
    _shares: list[Share] = field(default_factory=list)
    _loose: list[Loose] = field(default_factory=list)
    _attached: bool = False  # whether the parameters' ``grad`` are this one's
    _pending: list[int] = field(default_factory=list)
    _next: int = 0
    _armed: bool = False
    _reductions: list[Reduction] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)
    _launched: Launched | None = None
    _noted: Noted | None = None

    @classmethod
    def build(
        cls,
        stage: int,
        parameters: Sequence[nn.Parameter],
        *,
        count: int,
        group: dist.ProcessGroup | None,
        launched: Launched | None = None,
        noted: Noted | None = None,
        sharded: bool = False,
        wire: torch.dtype | None = None,
        narrow: bool = False,
        loose: bool = False,
        experts: Sequence[nn.Parameter] = (),
        expert_group: dist.ProcessGroup | None = None,
    ) -> StageGradients:
        """Lays out the buffers and hooks the parameters.

        The trained parameters are in forward order; ``experts`` are reduced over a group of their
        own. ``loose``: gradients may lie anywhere, as long as they are of their weights' type.
        ``noted`` is called with this rank's own part of a bucket, before others are added,
        ``launched`` when its reduction starts.
        """
        gradients = cls(stage, group, count, wire, narrow, _launched=launched, _noted=noted)
        gradients._lay_out(parameters, group, sharded=sharded, experts=False, loose=loose)
        gradients._lay_out(experts, expert_group, sharded=sharded, experts=True, loose=loose)
        gradients.add_hooks()
        return gradients

    def _lay_out(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        sharded: bool,
        experts: bool,
        loose: bool,
    ) -> None:
        count, sharded = max(self.count, 1), sharded and group is not None
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in reversed(parameters):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, members in by_dtype.items():
            sizes = tuple(parameter.numel() for parameter in members)
            whole = sum(sizes)
            device = members[0].device
            if loose and dtype == main_dtype(dtype):
                apart = tuple(map(Loose, members))
                self._loose += apart
                layout = FlatLayout((), count, tail=len(sizes))
                marks = torch.zeros(len(sizes), dtype=dtype, device=device)
                self.buffers.append(
                    Buffer(layout, tuple(members), marks, marks, experts=experts, loose=apart)
                )
                continue
            summed = dtype if self.narrow else main_dtype(dtype)
            # A mark per parameter stands behind the gradients and is reduced with them, so that
            # all replicas agree on which parameters no step has used. A share of the marks would
            # not tell that: they are reduced by themselves where gradients are scattered.
            if sharded:
                assert group is not None
                layout = FlatLayout(sizes, count, group.size())
                marks = torch.zeros(len(sizes), dtype=summed, device=device)
            else:
                layout = FlatLayout(sizes, count, tail=len(sizes))
            flat = torch.zeros(layout.bounds[-1], dtype=summed, device=device)
            if not sharded:
                marks = flat[whole : whole + len(sizes)]
            buffer = Buffer(layout, tuple(members), flat, marks, group, sharded, experts)
            self.buffers.append(buffer)
            for index, (parameter, start) in enumerate(zip(members, layout.starts, strict=False)):
                stop = start + parameter.numel()
                covered = {*layout.buckets_of(start, stop)}
                if not sharded:
                    covered |= {*layout.buckets_of(whole + index, whole + index + 1)}
                view = flat[start:stop].view_as(parameter)
                mark = marks[index : index + 1]
                share = Share(parameter, view, tuple(sorted(covered)), mark, group is not None)
                self._shares.append(share)

    def add_hooks(self) -> None:
        """Follows the parameters' gradients (again); without effect if it does."""
        if not self._handles:
            for share in self._shares:
                hooked: Any = share.parameter  # The hook's registration is untyped in torch.
                handle = hooked.register_post_accumulate_grad_hook(self._hook(share))
                self._handles.append(handle)

    def _hook(self, share: Share) -> Callable[[Tensor], None]:
        # Called for every parameter in every backward: what does not change is looked up here.
        view, widened, place = share.view, share.widened, share.view.data_ptr()

        def ready(parameter: Tensor) -> None:
            grad = parameter.grad
            if widened:
                if grad is not None:
                    view.add_(grad)
                    parameter.grad = None
            elif grad is not None and grad.data_ptr() != place:
                # Autograd put a tensor of its own there: it holds the old sum and the new gradient.
                view.copy_(grad)
                parameter.grad = view
            if not share.touched:
                share.touched = True
                share.mark.add_(1)  # a taint stays
            if self._armed:
                for bucket in share.buckets:
                    self._pending[bucket] -= 1
                self._launch_ready()

        return ready

    def attach(self, *, zero: bool) -> None:
        """Points every ``parameter.grad`` into the buffer, cleared if ``zero``."""
        self.detach()
        if zero:
            for buffer in self.buffers:
                buffer.flat.zero_()
                buffer.marks.zero_()
        self._attached = True
        for loose in self._loose:
            loose.sum = None if zero else loose.sum
            loose.parameter.grad = loose.sum
        for share in self._shares:
            share.touched = share.touched and not zero
            if not share.widened:
                share.parameter.grad = share.view

    def detach(self) -> None:
        """Takes the gradients away from the parameters; the buffer keeps them."""
        self._take()
        self._attached = False
        for loose in self._loose:
            loose.parameter.grad = None
        for share in self._shares:
            share.parameter.grad = None
            for main, _ in self.targets.get(id(share.parameter), ()):
                main.grad = None

    def _take(self) -> None:
        if self._attached:
            for loose in self._loose:
                loose.take()

    def clear(self, wanted: Collection[int]) -> None:
        """Begins a new sum for the parameters of these identities.

        One whose gradient somebody has set to None is one that no step has used.
        """
        for loose in self._loose:
            if id(loose.parameter) in wanted:
                loose.sum = loose.parameter.grad
                if loose.sum is not None:
                    loose.sum.zero_()
        for share in self._shares:
            if id(share.parameter) in wanted:
                share.view.zero_()
                if share.parameter.grad is None:
                    share.touched = False
                    share.mark.zero_()
                share.parameter.grad = share.view

    def arm(self, awaited: Iterable[Tensor] | None = None) -> None:
        """The next backward of this stage is its last: buckets may go as they get ready.

        It will touch the parameters ``awaited``, None for all; the others are ready now.
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
        started: list[Reduction] = []
        grouped = [buffer for buffer in self.buffers if buffer.group is not None]
        if grouped:
            if self._noted is not None:
                parts = [buffer.bucket(bucket) for buffer in grouped]
                self._noted(self.stage, bucket, [part for part in parts if part.numel()])
            for buffer in grouped:
                gradient = buffer.bucket(bucket)
                if gradient.numel():
                    started.append(self._start(gradient, buffer))
                if buffer.sharded and self._next == self.count:
                    assert buffer.group is not None
                    started.append(start_all_reduce(buffer.marks, buffer.group))
            # What has arrived is summed now, so that its buffer does not stay until the flush.
            while self._reductions and self._reductions[0].arrived():
                self._reductions.pop(0).finish()
            self._reductions += started
        if self._launched is not None:
            self._launched(self.stage, bucket, started[-1].work if started else None)

    def starter(self, buffer: Buffer) -> Callable[[Tensor], Reduction]:
        """What starts the reduction of such a buffer's buckets."""
        return partial(self._start, buffer=buffer)

    def _start(self, bucket: Tensor, buffer: Buffer) -> Reduction:
        assert buffer.group is not None
        start = start_reduce_scatter if buffer.sharded else start_all_reduce
        return start(bucket, buffer.group, wire=self.wire)

    def end(self) -> None:
        """Returns when all started reductions have ended."""
        for reduction in self._reductions:
            reduction.finish()
        self._reductions.clear()
        self._armed = False
        self._take()

    def multiply(self, factor: float) -> None:
        """Multiplies sums that are complete."""
        for buffer in self.buffers:
            if not buffer.loose:
                buffer.flat[: sum(buffer.layout.sizes)].mul_(factor)
        for loose in self._loose:
            if loose.sum is not None:
                loose.sum.mul_(factor)

    def show(self) -> None:
        """Puts sums that are complete where optimizers look for them."""
        for share in self._shares:
            # Optimizers skip None, but decay a weight whose gradient is zero.
            used = share.touched or (share.grouped and bool(share.mark.item()))
            targets = self.targets.get(id(share.parameter))
            if targets is not None:
                # Nobody is to take a replica's own part of the sum for the gradient.
                share.parameter.grad = None
                for main, gradient in targets:
                    main.grad = gradient if used else None
            elif not used:
                share.parameter.grad = None

    def widen(self) -> None:
        """Gives what the optimizer updates gradients of its own type; all sums are complete."""
        for targets in self.targets.values():
            for main, _ in targets:
                if main.grad is not None and main.grad.dtype != main.dtype:
                    main.grad = main.grad.to(main.dtype)

    def adopt(self) -> None:
        """Takes over gradients that somebody has put in the place of those in the buffer."""
        for loose in self._loose:
            loose.sum = loose.parameter.grad
        for share in self._shares:
            if share.widened or id(share.parameter) in self.targets:
                continue
            adopt_gradient(share.parameter, share.view)

    def taint(self, nothing: Tensor) -> None:
        """Lets all members of the group know of a NaN, without a message of its own.

        ``nothing`` is a scalar, 0 or NaN, which stays on its device.
        """
        if self.buffers:
            self.buffers[0].marks[:1].add_(nothing.to(self.buffers[0].marks.dtype))

    @property
    def tainted(self) -> bool:
        """Whether any member has been, once reductions have ended; waits for the device."""
        return bool(self.buffers) and not bool(torch.isfinite(self.buffers[0].marks[0]))

    def views(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Every trained parameter with its gradient, which is 0 where no step has used it."""
        self._take()
        yield from ((share.parameter, share.view) for share in self._shares)
        for loose in self._loose:
            found = loose.sum
            yield loose.parameter, torch.zeros_like(loose.parameter) if found is None else found

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def squared_norm(
        self,
        counts: Callable[[Tensor], bool] | None = None,
        first: Callable[[Buffer], bool] = lambda _: True,
    ) -> Tensor:
        """Sum of squares of the stage's gradient, or of this member's share.

        Of the parameters that ``counts`` takes; of a buffer that is the same on several ranks only
        where ``first`` says that this is the first of them. A float64 scalar, on the gradients'
        device still.
        """
        self._take()
        device = self.buffers[0].flat.device if self.buffers else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        for buffer in self.buffers:
            if not (buffer.sharded or first(buffer)):
                continue
            if buffer.loose:
                sums = (
                    loose.sum for loose in buffer.loose if counts is None or counts(loose.parameter)
                )
                total = total + get_total_norm(g for g in sums if g is not None).double().square()
                continue
            for part in self._parts(buffer, counts):
                total = total + _norm(part).square()
        return total

    def _parts(self, buffer: Buffer, counts: Callable[[Tensor], bool] | None) -> list[Tensor]:
        layout = buffer.layout
        ranges: list[tuple[int, int]] = []
        if buffer.sharded:
            assert buffer.group is not None
            member = buffer.group.rank()
            if counts is None:
                ranges += layout.owned(member)
            for index, parameter in enumerate(buffer.parameters):
                if counts is not None and counts(parameter):
                    ranges += layout.pieces(index, member)
        elif counts is None:
            ranges.append((0, sum(parameter.numel() for parameter in buffer.parameters)))
        else:
            for parameter, start in zip(buffer.parameters, layout.starts, strict=False):
                if counts(parameter):
                    ranges.append((start, start + parameter.numel()))
        return [buffer.flat[start:stop] for start, stop in ranges]


def _norm(part: Tensor) -> Tensor:
    # Of 16-bit numbers in 32.
    norm: Tensor = torch.linalg.vector_norm(part, dtype=main_dtype(part.dtype))
    return norm.double()


def adopt_gradient(parameter: nn.Parameter, view: Tensor) -> None:
    """Lets a parameter's gradient lie in ``view`` again, with the values that it has now."""
    if parameter.grad is None:
        view.zero_()
    elif parameter.grad.data_ptr() != view.data_ptr():
        view.copy_(parameter.grad)
        parameter.grad = view


def clip_(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scales gradients by limit / norm where that is below one, as torch's own clipping does."""
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            alike.setdefault((grad.device, grad.dtype), []).append(grad)
    for (_, dtype), grads in alike.items():
        scalar = factor.to(dtype)
        # A number of the host goes with the kernels: a copy of it would wait for the device.
        torch._foreach_mul_(grads, scalar if scalar.is_cuda else scalar.item())
