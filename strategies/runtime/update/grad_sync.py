"""Gradients in contiguous memory, reduced bucket by bucket while the backward still runs.

One flat buffer per stage and dtype holds all gradients of the stage; a bucket is an equal share of
it, so the number of buckets depends on the stage's size alone and the program can be compiled
without the model. Parameters lie in reverse order: the last layers' gradients, ready first, come
first. ``parameter.grad`` is a view, so accumulation over microbatches costs no copy, and a bucket
is reduced in place, asynchronously.

Gradients of 16-bit weights are summed in 32 bits: the buffer is wider than the parameter, whose own
``grad`` holds one microbatch's gradient until its hook has added it. ``narrow`` ones are summed in
16, and become 32 when the optimizer is about to read them.

With sharded weights (``weight_shards``) a bucket is reduced and scattered: each member of the group
ends up with the sum of its share alone.

Experts have buffers of their own, because fewer ranks hold the same of them; a bucket is then a
share of each buffer, and each goes to its own group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.runtime.update.reduction import Reduction, start_all_reduce, start_reduce_scatter

Launched = Callable[[int, int, dist.Work | None], None]
Noted = Callable[[int, int, Sequence[Tensor]], None]


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

    def bucket(self, index: int) -> Tensor:
        bounds = self.layout.bounds
        return self.flat[bounds[index] : bounds[index + 1]]


@dataclass
class _Share:
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
class StageGradients:
    """The gradient buffer of one stage on one rank."""

    stage: int
    group: dist.ProcessGroup | None  # owners x dp; None when there is nobody to reduce with
    count: int  # of buckets
    wire: torch.dtype | None = None  # type in which gradients travel; None for their own
    narrow: bool = False  # whether gradients are summed in the weights' own type
    buffers: list[Buffer] = field(default_factory=list)  # one per type of parameter
    # By the id of a parameter that the optimizer does not update itself: what it updates instead,
    # with the part of the buffer that is its gradient.
    targets: dict[int, list[tuple[nn.Parameter, Tensor]]] = field(default_factory=dict)
    _shares: list[_Share] = field(default_factory=list)
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
        experts: Sequence[nn.Parameter] = (),
        expert_group: dist.ProcessGroup | None = None,
    ) -> StageGradients:
        """Lays out the buffers and hooks the parameters.

        The trained parameters are in forward order; ``experts`` are reduced over a group of their
        own. ``noted`` is called with this rank's own part of a bucket, before others are added,
        ``launched`` when its reduction starts.
        """
        gradients = cls(stage, group, count, wire, narrow, _launched=launched, _noted=noted)
        gradients._lay_out(parameters, group, sharded=sharded, experts=False)
        gradients._lay_out(experts, expert_group, sharded=sharded, experts=True)
        gradients.add_hooks()
        return gradients

    def _lay_out(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        sharded: bool,
        experts: bool,
    ) -> None:
        count, sharded = self.count, sharded and group is not None
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in reversed(parameters):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, members in by_dtype.items():
            sizes = tuple(parameter.numel() for parameter in members)
            whole = sum(sizes)
            device = members[0].device
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
                share = _Share(parameter, view, tuple(sorted(covered)), mark, group is not None)
                self._shares.append(share)

    def add_hooks(self) -> None:
        """Follows the parameters' gradients (again); without effect if it does."""
        if not self._handles:
            for share in self._shares:
                hooked: Any = share.parameter  # The hook's registration is untyped in torch.
                handle = hooked.register_post_accumulate_grad_hook(self._hook(share))
                self._handles.append(handle)

    def _hook(self, share: _Share) -> Callable[[Tensor], None]:
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
        if zero:
            for buffer in self.buffers:
                buffer.flat.zero_()
                buffer.marks.zero_()
        self.detach()
        for share in self._shares:
            share.touched = share.touched and not zero
            if not share.widened:
                share.parameter.grad = share.view

    def detach(self) -> None:
        """Takes the gradients away from the parameters; the buffer keeps them."""
        for share in self._shares:
            share.parameter.grad = None
            for main, _ in self.targets.get(id(share.parameter), ()):
                main.grad = None

    def clear(self, wanted: Collection[int]) -> None:
        """Begins a new sum for the parameters of these identities.

        One whose gradient somebody has set to None is one that no step has used.
        """
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
        """Every trained parameter with where its gradient lies."""
        return ((share.parameter, share.view) for share in self._shares)

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
        device = self.buffers[0].flat.device if self.buffers else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        for buffer in self.buffers:
            if not (buffer.sharded or first(buffer)):
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
    for parameter in parameters:
        if parameter.grad is not None:
            # A scalar of the host goes with the kernel: a copy of it would wait for the device.
            parameter.grad.mul_(factor.to(parameter.grad.dtype))


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
