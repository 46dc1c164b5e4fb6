"""The exchange of tokens between ranks that hold different experts, and its backward.

Each rank brings rows that are sorted by expert. How many go to whom is told first, then the rows
themselves travel, all to all and in uneven numbers; every rank computes its own experts on what has
arrived, and the results travel back the same way (Lepikhin et al., 2020,
https://arxiv.org/abs/2006.16668). A gradient takes the same two ways in the other direction. A rank
to which nobody sends anything takes part in all of it, with no rows.

What needs no rows that travel (experts that every token goes to) is computed between ``send`` and
``computed``, and its backward while gradients are on their way back.

All ranks of a group run the same program on as many microbatches, so their exchanges come in one
order, in forwards, backwards and forwards that are run again.

Ranks of tensor parallelism have the same tokens. Each of them has its share of the rows computed,
and all of them gather the results, so no expert sees a token twice. Or each has a share of every
expert's matrices (``expert_tp``): then all rows go to ranks with the same share, what comes back
are parts, and the ranks of tensor parallelism add these up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.models.state import kept_generators
from strategies.models.tensor_parallel.regions import Entrance, as_written, leave
from strategies.models.tensor_parallel.tensor_ranks import Grid, Shard, TensorRanks

# --------------------------------------------------------------------------------------------------
# A forward and a backward of one rank in turn, each while the other's tokens travel.
#
# The forward runs in the caller's thread and the backward in another one, of which only one runs at
# a time: one that has sent its tokens switches to the other, and waits for them when it runs again.
# So the exchange of one microbatch runs under the compute of the other (as in DualPipe,
# https://arxiv.org/abs/2412.19437), in an order that is the same on all ranks that exchange.


class _PeerThreadError(Exception):
    """The other thread has failed: its peers do not answer this one's exchanges."""


class TwoThreads:
    """Two threads of which one runs at a time, for the halves of a pair."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._mine = threading.Condition()
        self._turn = 0  # whose it is: 0 the caller's, 1 the other thread's
        self._alive = [False, False]
        self._failed = False

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Runs both to their ends; what either raises is raised.

        The second one, a backward, starts: its first all-to-all then runs under the forward's first
        segment, and the forward's last one under the backward's last segment.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="backward")
        self._alive, self._turn, self._failed = [True, True], 0, False
        other: Future[None] = self._pool.submit(self._run_other, second)
        try:
            self.switch()
            first()
        except _PeerThreadError:
            pass  # The other one's error is the one to tell.
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end(0)
            error = other.exception()
        if error is not None:
            raise error

    @property
    def whose(self) -> int:
        """Who runs: 0 for the first thread, and where there is no pair; 1 for the second."""
        return self._turn if any(self._alive) else 0

    def switch(self) -> None:
        """Lets the other thread run until it switches back or has ended.

        Whose thread it is says nothing: autograd runs a backward on a GPU in one of its own.
        """
        number = self._turn
        if not all(self._alive):
            return
        # What a thread draws does not depend on what the other one has drawn meanwhile.
        with kept_generators(), self._mine:
            self._turn = 1 - number
            self._mine.notify_all()
            self._mine.wait_for(lambda: self._turn == number)
        if self._failed:
            raise _PeerThreadError

    def _run_other(self, second: Callable[[], None]) -> None:
        with self._mine:
            self._mine.wait_for(lambda: self._turn == 1)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            if not self._failed:
                second()
        except _PeerThreadError:
            pass
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end(1)

    def _end(self, number: int) -> None:
        with self._mine:
            self._alive[number] = False
            self._turn = 1 - number
            self._mine.notify_all()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


# --------------------------------------------------------------------------------------------------
Compute = Callable[[Tensor, Tensor], Tensor]


class ExpertRanks:
    """The ranks that hold all experts of a stage together, as one of them sees it.

    Attributes:
        rank: This process among them.
        size: How many they are, ep >= 1.
        turns: Where a forward and a backward run in turn; else an exchange is waited for at once.
        slicers: Who shares each expert's matrices; None where they are whole.
        num_calls: How often a layer has had rows computed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        sharers: TensorRanks | None = None,
        turns: TwoThreads | None = None,
        sliced: bool = False,
    ) -> None:
        """``group`` is None for a single process; ``sharers`` share its matrices.

        They have the same tokens as this rank, unless the sequence is cut between them. With
        ``sliced`` they share those of experts, too.
        """
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.turns = turns
        self.num_calls = 0
        # Is told of every exchange that begins, and whether it is one of gradients.
        self.watch: Callable[[dist.Work, bool], None] | None = None
        self.slicers = sharers if sliced else None
        self._sharers = None if sliced or sharers is None or sharers.sequence else sharers

    @property
    def place(self) -> int:
        """Which of all shares of a layer's experts this process has."""
        return (
            self.rank if self.slicers is None else self.rank * self.slicers.size + self.slicers.rank
        )

    def whole(self, share: Tensor, shard: Shard | Grid) -> Tensor:
        """All experts of a stack, from this rank's share of them; collective."""
        experts = shard
        if isinstance(shard, Grid):
            assert self.slicers is not None
            share = shard.inner.whole(self.slicers.gather(share).unbind(0))
            experts = shard.outer
        assert isinstance(experts, Shard)
        shares = share.unsqueeze(0)
        if self._group is not None:
            shares = TensorRanks(self._group).gather(share)
        return experts.whole(shares.unbind(0))

    @as_written
    def enter(self, tensor: Tensor) -> Tensor:
        """What experts, or the sum of their results, read; slices of them add up its gradient."""
        if self.slicers is None:
            return tensor
        return Entrance(self.slicers)(tensor)

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of what slices of experts have given; takes the tensor's memory."""
        return partial if self.slicers is None else leave(partial, self.slicers)

    @as_written
    def around(
        self, compute: Compute, rows: Tensor, counts: Tensor, *, parts: bool = False
    ) -> Tensor:
        """Has rows computed where their experts are.

        Args:
            compute: Of this rank's experts: rows ``[n, in]`` sorted by expert, and how many each
                has ``[experts / ep]``, to ``[n, out]``. Takes no rows, too, and depends on the same
                parameters then.
            rows: ``[n, in]``, sorted by expert. Where no ranks have the same tokens more may stand
                behind those of the last expert: they stay here.
            counts: How many rows each expert of the layer has, ``[experts]``, whole numbers.
            parts: Whether the caller has entered what rows are made of, and makes the sum itself of
                what slices of experts give.

        Returns:
            ``[counts.sum(), out]`` in the order of ``rows``.
        """
        if self.slicers is not None and not parts:
            return self.leave(self._exchanged(compute, self.enter(rows), counts))
        if self._sharers is None:
            return self._exchanged(compute, rows, counts)
        share = _Share(self._sharers, len(rows))
        own = _TakeShare.apply(rows, share)  # type: ignore[no-untyped-call]
        result = self._exchanged(compute, own, share.counts(counts))
        gathered: Tensor = _GatherShares.apply(result, share)  # type: ignore[no-untyped-call]
        return gathered

    def _exchanged(self, compute: Compute, rows: Tensor, counts: Tensor) -> Tensor:
        return self._computed(compute, self._sent(rows, counts))

    @as_written
    def send(self, rows: Tensor, counts: Tensor) -> Sent:
        """Sends rows to their experts, and comes back while they travel; see ``around``.

        Where slices of experts are computed the caller adds up what ``computed`` gives.
        """
        if self._sharers is None:
            return self._sent(rows, counts)
        share = _Share(self._sharers, len(rows))
        own = _TakeShare.apply(rows, share)  # type: ignore[no-untyped-call]
        return self._sent(own, share.counts(counts), share)

    @as_written
    def computed(self, compute: Compute, sent: Sent) -> Tensor:
        """What the experts give, in the order of the rows that were sent."""
        result = self._computed(compute, sent)
        if sent.share is None:
            return result
        gathered: Tensor = _GatherShares.apply(result, sent.share)  # type: ignore[no-untyped-call]
        return gathered

    def _sent(self, rows: Tensor, counts: Tensor, share: _Share | None = None) -> Sent:
        self.num_calls += 1
        if self._group is None:
            if share is None and self.slicers is None:  # Else there are no others behind.
                rows = rows[: int(counts.sum())]
            return Sent(rows, counts, None, share)
        told = counts.view(self.size, -1)
        heard = self._tell(told)
        away, here = torch.stack((told.sum(1), heard.sum(1))).tolist()
        way = _Exchange(self, away, here)
        travelling: Tensor = _StartAllToAll.apply(rows[: sum(away)], way)  # type: ignore[no-untyped-call]
        return Sent(travelling, heard, way, share)

    def _computed(self, compute: Compute, sent: Sent) -> Tensor:
        heard, way = sent.counts, sent.way
        if way is None:
            return compute(sent.rows, heard)
        arrived: Tensor = _WaitAllToAll.apply(sent.rows, way)  # type: ignore[no-untyped-call]
        # From sources one after the other to experts one after the other, and back.
        experts = torch.arange(heard.shape[1], device=heard.device).repeat(self.size)
        owners = torch.repeat_interleave(experts, heard.flatten(), output_size=sum(way.here))
        order = torch.argsort(owners, stable=True)
        result = compute(arrived.index_select(0, order), heard.sum(0))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        home = _Exchange(self, way.here, way.away)
        returning: Tensor = _StartAllToAll.apply(result.index_select(0, back), home)  # type: ignore[no-untyped-call]
        returned: Tensor = _WaitAllToAll.apply(returning, home)  # type: ignore[no-untyped-call]
        return returned

    def _tell(self, counts: Tensor) -> Tensor:
        """Row r to rank r; row r of the result is what rank r has told this one."""
        given = counts.contiguous()
        if self._by_host(given):
            return self._tell(given.cpu()).to(given.device)
        heard = torch.empty_like(given)
        dist.all_to_all_single(heard, given, group=self._group)
        return heard

    def depart(
        self, rows: Tensor, away: Sequence[int], here: Sequence[int], *, gradients: bool = False
    ) -> tuple[Tensor, dist.Work | None]:
        """The first ``away[0]`` rows to rank 0, and so on; ``here`` is how many each one sends.

        Returns:
            What is filled while they travel, and what to wait for.
        """
        given = rows.contiguous()
        if self._by_host(given):
            moved, work = self.depart(given.cpu(), away, here, gradients=gradients)
            self.arrive(work)
            return moved.to(given.device), None
        moved = given.new_empty((sum(here), *given.shape[1:]))
        # Bytes, because gloo does not know all types of numbers here.
        plain = given.dtype not in (torch.float32, torch.float64)
        sent, received = (t.view(torch.uint8) if plain else t for t in (given, moved))
        work = dist.all_to_all_single(
            received, sent, list(here), list(away), group=self._group, async_op=True
        )
        assert work is not None
        if self.watch is not None:
            self.watch(work, gradients)
        return moved, work

    def arrive(self, work: dist.Work | None) -> None:
        """Waits for what has departed; in a pair the other thread runs meanwhile."""
        if work is None:
            return
        if self.turns is not None:
            self.turns.switch()
        work.wait()

    def _by_host(self, tensor: Tensor) -> bool:
        # On a GPU gloo has no all-to-all.
        return tensor.is_cuda and dist.get_backend(self._group) == "gloo"


class _Exchange:
    """One exchange of rows, there in the forward and back in the backward."""

    def __init__(self, ranks: ExpertRanks, away: Sequence[int], here: Sequence[int]) -> None:
        self.ranks, self.away, self.here = ranks, away, here
        self.work: dist.Work | None = None
        self.sent: Tensor | None = None  # which is read until the work has ended
        self._filled: Tensor | None = None

    def begin(self, rows: Tensor, *, back: bool) -> None:
        away, here = (self.here, self.away) if back else (self.away, self.here)
        self.sent = rows.contiguous()
        self._filled, self.work = self.ranks.depart(self.sent, away, here, gradients=back)

    def end(self) -> Tensor:
        """What has arrived."""
        self.ranks.arrive(self.work)
        found, self.work, self.sent, self._filled = self._filled, None, None, None
        assert found is not None
        return found


class Sent(NamedTuple):
    """Rows on their way to their experts."""

    rows: Tensor  # where they travel an empty tensor, which only ties both ends together
    counts: Tensor  # of each expert's rows here, by the rank that sends them; or of all rows
    way: _Exchange | None  # None where nothing travels
    share: _Share | None  # of ranks with the same tokens, this one's


class _StartAllToAll(torch.autograd.Function):
    """Begins an exchange; in the backward, waits for that of gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Exchange) -> Tensor:
        ctx.way = way
        way.begin(rows, back=False)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.way.end(), None


class _WaitAllToAll(torch.autograd.Function):
    """Waits for an exchange; in the backward, begins that of gradients.

    What has arrived is nobody's view: whoever reads it may write to it.
    """

    @staticmethod
    def forward(ctx: Any, travelling: Tensor, way: _Exchange) -> Tensor:
        ctx.way = way
        return way.end()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.way.begin(gradient, back=True)
        return gradient.new_empty(0), None


class _Share:
    """Which of ``total`` rows, sorted by expert, one of the ranks with the same tokens takes."""

    def __init__(self, sharers: TensorRanks, total: int) -> None:
        self._sharers = sharers
        self._total = total
        self._width = -(-total // sharers.size)
        self.start = min(sharers.rank * self._width, total)
        self.stop = min(self.start + self._width, total)

    def counts(self, counts: Tensor) -> Tensor:
        """How many of its rows each expert has."""
        ends = counts.cumsum(0)
        starts = ends - counts
        return ends.clamp(self.start, self.stop) - starts.clamp(self.start, self.stop)

    def taken(self, rows: Tensor) -> Tensor:
        return rows[self.start : self.stop].clone(memory_format=torch.contiguous_format)

    def gathered(self, share: Tensor) -> Tensor:
        padded = share.new_zeros((self._width, *share.shape[1:]))
        padded[: len(share)] = share
        whole = self._sharers.gather(padded).flatten(0, 1)[: self._total]
        # The same memory and no view of it: autograd lets nobody write to a function's view.
        memory, begin = whole.untyped_storage(), whole.storage_offset()
        return whole.new_empty(0).set_(memory, begin, whole.shape, whole.stride())


class _TakeShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: _Share) -> Tensor:
        ctx.share = share
        return share.taken(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.share.gathered(gradient), None


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, share: _Share) -> Tensor:
        ctx.share = share
        return share.gathered(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.share.taken(gradient), None
