"""What ends a training pass: reductions, the gradient's norm, the verdict on it, and the STEPs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.heartbeat import Phase
from strategies.ir.kinds import Kind
from strategies.ir.program import Placement
from strategies.models.state import Fetch
from strategies.runtime.messages.mesh import Communicators, Coordinates
from strategies.runtime.step.rank_parts import RankParts
from strategies.runtime.update.nan_guard import Finding, all_finite
from strategies.runtime.update.post_validation import Question
from strategies.runtime.update.rank_gradients import OwnedWeights, RankGradients


@dataclass(frozen=True)
class _Asked:
    """An update whose sums are complete, and whose verdict is on its way."""

    gradients: RankGradients
    norm: Fetch | None
    norm_work: dist.Work | None
    norm_to_share: bool
    not_finite: bool
    question: Question


class Flush:
    """The end of a rank's training passes; the only place where it waits for reductions."""

    def __init__(
        self,
        parts: RankParts,
        weights: OwnedWeights,
        gradients: RankGradients,
        placement: Placement,
        where: Coordinates,
        communicators: Communicators,
    ) -> None:
        self._parts = parts
        self._weights = weights
        self._gradients = gradients
        self._placement = placement
        self._where = where
        self._communicators = communicators
        self._done = False
        self._owes = False  # whether a pass has started reductions that nobody has waited for
        self._not_finite = False
        self._factor = 1.0
        self._loss_scale: Tensor | None = None
        self._flushed_at: Any = None
        self._norm: Fetch | None = None
        # The squared norm of the gradients as this flush has left them, for whoever clips first.
        self._squared: Tensor | None = None
        self._norm_to_share = False
        self._norm_work: dist.Work | None = None
        self._asked: deque[_Asked] = deque()  # of updates that are not due yet
        self._question: Question | None = None  # of the one that is
        # What clipping costs, per step: the only synchronisation between the ranks of a pipeline.
        self.norm_waits_s: deque[float] = deque(maxlen=1024)

    def take(self, gradients: RankGradients) -> None:
        """Goes on with other sums: those of the update that is applied next."""
        self._gradients = gradients

    def expect(self, loss_scale: Tensor | None) -> None:
        """A pass begins, whose gradients are multiplied by ``loss_scale``; None for 1."""
        self._done = False
        self._factor = 1.0
        self._loss_scale = loss_scale

    def owe(self, factor: float = 1.0) -> None:
        """The pass that has run has started reductions; ``factor`` is on their sums."""
        self._owes, self._factor = True, factor

    def catch_up(self) -> None:
        """Ends what is owed: an ``optimizer_step`` has run the closure and left out the step."""
        if self._owes:
            self.run()

    def run(self) -> None:
        """Waits for this rank's reductions; no other rank is waited for. Once per pass."""
        self._owes = False
        if self._done:
            return
        self._done = True
        parts = self._parts
        parts.pulse.phase(Phase.REDUCING)
        self._question = None
        if self._asked and self._asked[0].gradients is self._gradients:
            asked = self._asked.popleft()
            self._norm, self._norm_work = asked.norm, asked.norm_work
            self._norm_to_share, self._not_finite = asked.norm_to_share, asked.not_finite
            self._question = asked.question
            self._squared = None
            self._gradients.end()  # What counts on another rank.
            self._gradients.show()
        else:
            self._end()
        self._gradients.widen()
        parts.pulse.phase(Phase.UPDATING)
        self._flushed_at = parts.recorder.stamp()

    def _end(self, *, early: bool = False) -> None:
        """The sums are complete and shown behind it, and their norm is noted."""
        self._gradients.end(early=early)
        if self._factor != 1:
            self._gradients.multiply(self._factor)
        self._gradients.show()
        if self._parts.tensor_ranks is not None:
            self._gradients.add_up_partial(self._parts.tensor_ranks, self._parts.model)
        self._note_norm()

    def ask_early(self, gradients: RankGradients, limit: float | None) -> None:
        """Ends an update's reductions and starts to ask for its verdict, before it is due.

        The gradients are attached, and belong to the caller again behind it. What is asked for is
        as in ``ask``. Collective, and in the same order among everything that is, on all ranks.
        """
        group = self._update_group("verdict")
        if group is None:
            return
        kept = self._gradients, self._norm, self._norm_work
        kept_too = self._norm_to_share, self._not_finite, self._flushed_at
        self._gradients = gradients
        self._end(early=True)
        question = self.ask(limit, group=group, unchanged=True)
        self._squared = None
        self._asked.append(
            _Asked(
                gradients, self._norm, self._norm_work, self._norm_to_share,
                self._not_finite, question,
            )
        )  # fmt: skip
        self._gradients, self._norm, self._norm_work = kept
        self._norm_to_share, self._not_finite, self._flushed_at = kept_too

    def _local_squared_norm(self, only: Collection[int] | None = None) -> Tensor:
        shards = self._parts.model.shards
        device = self._parts.recorder.device
        return self._gradients.squared_norm(device, lambda name: name in shards, only)

    def _note_norm(self) -> None:
        """Keeps the norm for the next step's message; replicas' shares are added on the way."""
        squared = self._local_squared_norm()
        self._squared = squared
        # The next step's message adds replicas' shares to its own, in place.
        scale = self._loss_scale
        norm = squared.clone() if scale is None else squared / scale.double().square()
        self._norm = Fetch(norm)
        if self._parts.watch is not None:
            self._not_finite = self._sees_not_finite()
        self._norm_to_share = self._gradients.differs
        if not norm.is_cuda:
            self._share_norm()  # On a device that would wait for it.

    def _share_norm(self) -> None:
        if self._norm_to_share:
            self._norm_to_share = False
            members = self._where.replicas((self._where.pp_rank,))
            group = self._communicators.get("metrics", members)
            if group is not None:
                assert self._norm is not None
                norm = self._norm.tensor()
                self._norm_work = dist.all_reduce(norm, group=group, async_op=True)

    def noted_squared_norm(self) -> float | None:
        """This rank's part of the squared norm of the last flush, of the whole step's gradient.

        None before the first one.
        """
        if self._norm is None:
            return None
        self._share_norm()
        if self._norm_work is not None:
            self._norm_work.wait()  # On CPU it was started a step ago.
            self._norm_work = None
        return float(self._norm.tensor())

    def _squared_norm(self, only: Collection[int] | None, *, unchanged: bool) -> Tensor:
        """As ``_local_squared_norm``; with ``unchanged`` what the flush has computed, once."""
        noted, self._squared = self._squared, None
        return noted if unchanged and noted is not None else self._local_squared_norm(only)

    def gradient_norm(
        self, only: Collection[int] | None = None, *, unchanged: bool = False
    ) -> Tensor:
        """2-norm of the whole model's gradient, a float64 scalar, equal on all ranks.

        Collective over the replica, with sharded weights or experts that are spread over all
        processes. Weights that several ranks hold count once. It is on the host where ranks have
        talked about it. ``only`` are the identities of the parameters that count on this rank; None
        for all. ``unchanged``: all gradients are as the flush has left them.
        """
        if only is None and self._question is not None and self._question.limit is not None:
            return self._answer()
        total = self._squared_norm(only, unchanged=unchanged)
        if self._not_finite:
            total = torch.full_like(total, math.nan)  # also for a loss
        group = self._update_group()
        if group is not None:
            asked = time.perf_counter()
            self._parts.pulse.phase(Phase.REDUCING)
            total = total.cpu()
            dist.all_reduce(total, group=group)
            self._parts.pulse.phase(Phase.UPDATING)
            self.norm_waits_s.append(time.perf_counter() - asked)
        return total.sqrt()

    def _answer(self) -> Tensor:
        assert self._question is not None
        asked = time.perf_counter()
        self._parts.pulse.phase(Phase.REDUCING)
        answer = self._question.answer()
        self._parts.pulse.phase(Phase.UPDATING)
        self.norm_waits_s.append(time.perf_counter() - asked)
        self._flushed_at = self._parts.recorder.stamp()  # The update begins after that wait.
        return answer

    def ask(
        self,
        limit: float | None,
        *,
        group: dist.ProcessGroup | None = None,
        unchanged: bool = False,
    ) -> Question:
        """Starts to put the norm together, or the flag of ``leaves_out`` without a limit.

        Collective as they are, ``unchanged`` as in ``gradient_norm``; nobody waits here. There is
        somebody to ask.
        """
        group = group or self._update_group()
        assert group is not None
        if limit is None:
            value, op = (
                torch.tensor(float(self._not_finite), dtype=torch.float32),
                dist.ReduceOp.MAX,
            )
        else:
            value, op = self._squared_norm(None, unchanged=unchanged), dist.ReduceOp.SUM
            value = torch.full_like(value, math.nan) if self._not_finite else value
        value = value.cpu()
        work = dist.all_reduce(value, op=op, group=group, async_op=True)
        self._flushed_at = self._parts.recorder.stamp()
        return Question(value, work, limit)

    @property
    def alone(self) -> bool:
        """Whether this rank knows the whole norm by itself."""
        return self._update_group() is None

    def _update_group(self, purpose: str = "control") -> dist.ProcessGroup | None:
        """Who together holds the gradient of a whole model once."""
        if self._gradients.differs:
            return self._communicators.get(purpose, tuple(range(self._where.world_size)))
        return self._communicators.get(purpose, self._where.replica(self._where.dp_rank))

    def _sees_not_finite(self) -> bool:
        """Whether this rank alone would leave the step out; reductions have ended."""
        assert self._parts.watch is not None
        last = self._gradients.stages.get(self._placement.num_stages - 1)
        loss = self._parts.watch.loss
        if last is not None and last.buffers:
            lost = last.tainted
        else:
            # A last stage without weights has nothing that would tell other holders.
            alone = self._where.dp == 1 and self._placement.weight_copies == 1
            lost = alone and loss is not None and not bool(torch.isfinite(loss))
        if lost:
            return True
        assert self._norm is not None
        if self._loss_scale is not None or bool(torch.isfinite(self._norm.tensor())):
            return False  # A scaler looks for infs itself, and lowers the scale.
        # The sum of squares may overflow where no element does.
        return not all_finite(self._gradients.reduced().values())

    def leaves_out(self) -> bool:
        """Whether a loss or gradient is not finite on any rank: nobody may update then.

        Collective as ``gradient_norm`` is. Replicas that hold the same sums of gradients need no
        other word.
        """
        if self._question is not None and self._question.limit is None:
            return bool(self._answer())
        group = self._update_group()
        flag = torch.tensor(float(self._not_finite), dtype=torch.float32)
        if group is not None:
            self._parts.pulse.phase(Phase.REDUCING)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
            self._parts.pulse.phase(Phase.UPDATING)
            self._flushed_at = self._parts.recorder.stamp()  # The update begins after that wait.
        return bool(flag)

    def findings(self, *, kept: bool = False) -> list[Finding]:
        """What is not finite on this rank, for the message; after ``leaves_out``.

        Of the step before where that is what is ``kept``: the next one has begun.
        """
        assert self._parts.watch is not None
        stages = self._weights.by_stage
        reduced = self._gradients.reduced()
        watch = self._parts.watch.before if kept else self._parts.watch
        return (watch or self._parts.watch).findings(self._where, stages=stages, gradients=reduced)

    def end_step(self) -> None:
        """The optimizer has updated this rank's stages, or nobody's: the STEPs have ended."""
        recorder = self._parts.recorder
        record = recorder.current
        if record is not None:
            row = record.program.ranks[self._where.pp_rank]
            ended = recorder.stamp()
            # One optimizer steps all stages of a rank at once: the first STEP carries its time.
            # An event is one record's.
            started, self._flushed_at = self._flushed_at, None
            started = ended if started is None else started
            for place, item in enumerate(row):
                if item.kind is Kind.STEP:
                    record.start[place], record.end[place] = started, ended
                    started = ended
            recorder.finish()
        self._parts.pulse.phase(Phase.BETWEEN)
