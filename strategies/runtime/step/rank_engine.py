"""One rank of a running pipeline: model, programs, gradients and messages brought together.

Knows no Lightning; ``strategy.py`` calls it from Lightning's hooks, tests call it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec

from strategies.compiler import compile_short
from strategies.errors import DataError, ModelError
from strategies.heartbeat import Phase
from strategies.ir.kinds import Kind
from strategies.ir.program import Program
from strategies.models.collectives import default_group
from strategies.models.logs import LogEntry, join_replicas, start_packing, unpack_logs
from strategies.models.replay.whole_values import Step
from strategies.models.stage_model import LogCall, Mode
from strategies.models.state import Fetch, Generators, kept_generators
from strategies.models.step_state import Slot, StepState
from strategies.runtime.messages.fingerprint import compare, shared_print
from strategies.runtime.step.activation_bytes import ActivationBytes
from strategies.runtime.step.calls_state import Stream
from strategies.runtime.step.microbatch import (
    Microbatch,
    count_rows,
    first_rows,
    share_sizes,
    split_batch,
    start_checksum,
)
from strategies.runtime.step.rank_weights import RankWeights
from strategies.runtime.step.recorder import RankStep, StepRecord, StepStats, joined_stats
from strategies.runtime.step.stage_compute import PassOptions, StepResult
from strategies.runtime.step.whole_batch import Whole
from strategies.runtime.update.post_validation import UpdateUndone


@dataclass
class PassResult:
    """A pass as all ranks of the pipeline see it."""

    loss: float | None  # mean over all replicas' batches; None when the step returned none
    logs: list[LogCall]  # one call per logged name
    results: list[Any]  # return values per microbatch; on the last stage's rank only
    output: Any = None  # the step's return value for the batch, on every rank, if hooks look at it
    rows: int | None = None  # of all replicas' batches; None where ``logs`` are this replica's


class Engine(RankWeights):
    """Cuts the model, then runs training and evaluation passes."""

    def measure_activations(self) -> ActivationBytes:
        """Counts, from the next pass on, what this rank holds for its backwards; takes time."""
        if self._parts.activations is None:
            self._parts.activations = ActivationBytes(self.model.module)
        return self._parts.activations

    def measure_no_activations(self) -> None:
        self._parts.activations = None

    # ---------------------------------------------------------------- training

    def train_pass(
        self,
        batch: Any,
        *,
        batch_idx: int,
        step: int,
        accumulation: int,
        update: bool,
        factor: float = 1.0,
        loss_scale: Tensor | None = None,
        loaders: TreeSpec | None = None,
    ) -> PassResult:
        """Forwards and backwards of one batch.

        Args:
            batch: This replica's batch, the same on all its ranks.
            batch_idx: Lightning's index.
            step: Passes since the beginning of training, also across restarts: seeds dropout.
            accumulation: Batches per optimizer step; gradients are divided by it.
            update: Whether gradients are reduced, to be followed by ``flush``.
            factor: On all gradients.
            loss_scale: Factor on the loss, a scalar, which somebody takes off the gradients again
                between ``flush`` and the optimizer's update; None for 1.
            loaders: Where the batch has the batches of several loaders; None for one loader.
        """
        if self.stream is not None:
            self._gradients.add_hooks()  # This batch runs by itself.
            self._parts.gradients = self._gradients.stages
            self._flush.take(self._gradients)
        # The same rule by which Lightning clears gradients, and as often as it calls the closure.
        fresh = batch_idx % accumulation == 0
        if fresh:
            if self._weights.trained() != self._trained:
                self.late.settle()
            self._follow_freezing()
            self.mains.relink()
            if self._parts.watch is not None:
                self._parts.watch.begin(keep=self.late.open)
        elif self._weights.trained() != self._trained:
            raise ModelError(
                "parameters were frozen or unfrozen between two batches of one optimizer step "
                f"(accumulate_grad_batches={accumulation}). Do it at the beginning of an epoch."
            )
        if not self.late.open:
            self._gradients.attach(zero=fresh)  # else when the update before is confirmed
        self._flush.expect(loss_scale)
        scale = factor / (accumulation * self.coordinates.dp)
        options = PassOptions(
            batch_idx, "train", scale, loss_scale, self.seed_of(step), None, batch=batch
        )
        result = self._run(batch, options, step=step, update=update, loaders=loaders)
        # Lightning clears gradients after this and before backward(): keep ours out of its reach.
        self._gradients.detach()
        return result

    # ---------------------------------------------------------------- training without a flush

    def streams(self, batch: Any, loaders: TreeSpec | None) -> bool:
        """Whether a batch may enter behind those that are under way.

        One that gives fewer microbatches than a batch of the program, or others than those under
        way, runs by itself: from an empty pipeline to an empty one, with its own update.
        """
        return self.stream is not None and self.stream.takes(self._signature(batch, loaders))

    def _signature(self, batch: Any, loaders: TreeSpec | None) -> Any:
        return [m.signature for m in split_batch(batch, self.plan.num_microbatches, loaders)]

    def stream_pass(
        self,
        batch: Any,
        *,
        batch_idx: int,
        step: int,
        wait: bool,
        factor: float = 1.0,
        loaders: TreeSpec | None = None,
    ) -> tuple[list[PassResult], Callable[[], float | None]]:
        """Lets a batch in, and runs what else is to run before the next one.

        Returns:
            What earlier calls have said and, with ``wait``, this one; and this one's loss, to be
            looked at by whoever likes to wait for it.
        """
        stream = self.stream
        assert stream is not None
        if stream.empty:
            self._follow_freezing()
        elif self._weights.trained() != self._trained:
            raise ModelError(
                "parameters were frozen or unfrozen while microbatches are under way "
                f"(schedule={self.plan.schedule}). Do it at the beginning of an epoch."
            )
        if self._parts.watch is not None:
            self._parts.watch.turn()
        self._flush.expect(None)
        scale = factor / self.coordinates.dp
        options = PassOptions(
            batch_idx, "train", scale, None, self.seed_of(step), None, batch=batch
        )
        first = stream.empty
        program = stream.enter(self._signature(batch, loaders))
        stream.continue_sum()
        update = any(item.kind is Kind.STEP for row in program.ranks for item in row)
        hear = self._begin_pass(
            batch, options, program, step=step, update=update, loaders=loaders, stream=stream
        )
        stream.pause_sum()
        joins = self.coordinates.dp > 1
        look = (self._world_bulletin if joins else self._bulletin).peek(2)
        stream.unread.append(hear)
        wait = wait or first or stream.waits or "train" in self.whole.carried
        heard = self.hear(later=0 if wait else 1)
        return heard, lambda: self._mean_loss(self._by_replica(look(), joins))

    def hear(self, *, later: int = 0) -> list[PassResult]:
        """What calls have said that nobody has heard yet, but for the last ``later``; collective.

        Other ranks may still be at their last forwards: who hears all of it waits for them.
        """
        assert self.stream is not None
        unread, heard = self.stream.unread, []
        while len(unread) > later:
            heard.append(unread.popleft()())
        return heard

    def run_drain(self, program: Program) -> None:
        """One of the lists that empty the pipeline, up to its update."""
        stream = self.stream
        assert stream is not None
        stream.begin_drain(program)
        self._flush.expect(None)
        stream.continue_sum()
        options = PassOptions(0, "train", 1.0, None, None, None)
        with kept_generators():
            self._executor.run(
                program, (), options, step=-1, forwards_done=lambda _: None, stream=stream
            )
        stream.pause_sum()

    def make_room(self) -> None:
        """Right before an optimizer's step: it writes no weights that microbatches still need."""
        if self._parts.versions is not None:
            self._parts.versions.make_room()

    def evaluation_pass(
        self,
        batch: Any,
        *,
        mode: Mode,
        batch_idx: int,
        dataloader_idx: int | None = None,
        loaders: TreeSpec | None = None,
    ) -> PassResult:
        assert self.stream is None or self.stream.empty
        self.complete()
        options = PassOptions(batch_idx, mode, 1.0, None, None, dataloader_idx, batch=batch)
        return self._run(batch, options, step=batch_idx, update=False, loaders=loaders)

    # ---------------------------------------------------------------- manual optimization

    def begin_segments(self) -> None:
        """A batch begins that takes several passes, with optimizer steps wherever it likes."""
        if self._parts.watch is not None:
            self._parts.watch.begin()

    def deal_segments(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        loaders: TreeSpec | None,
        *,
        batch_idx: int,
        step: int,
        way: int,
        check: Callable[[Step, Any, Sequence[Any], Sequence[int]], None],
    ) -> Generators | None:
        """What all passes of a batch have in common of its rows; as ``WholeDraws.deal``.

        ``check`` looks at a way through the step when it is taken for the first time.
        """
        options = PassOptions(batch_idx, "train", 1.0, None, None, None)
        self._draws.look(
            batch, microbatches, options, loaders, whole=self.whole, way=way, then=check
        )
        self.whole.note()
        return self._draws.deal(
            batch, microbatches, options, loaders,
            seed=self.seed_of(step), state=self.whole.state, way=way,
        )  # fmt: skip

    def segment_pass(
        self,
        batch: Any,
        *,
        batch_idx: int,
        step: int,
        loaders: TreeSpec | None,
        part: str,
        backward: bool,
        retain_graph: bool,
    ) -> PassResult:
        """Forwards and backwards of one segment; gradients add up until ``settle``.

        Args:
            batch: This replica's batch.
            batch_idx: Lightning's index.
            step: As for ``train_pass``.
            loaders: As for ``train_pass``.
            part: Which segment it is, the same on all ranks.
            backward: Whether the segment ends with one.
            retain_graph: Whether its graphs are for another backward, too.
        """
        self._gradients.continue_sums()
        self._gradients.attach(zero=False)
        self._flush.expect(None)
        scale = 1.0 / self.coordinates.dp
        options = PassOptions(
            batch_idx, "train", scale, None, self.seed_of(step), None, part, retain_graph
        )
        return self._run(
            batch, options, step=step, update=False, loaders=loaders, backward=backward
        )

    def share_ends(
        self,
        loss: float | None,
        calls: Sequence[tuple[LogCall, float, int, int]],
        rows: int,
    ) -> PassResult:
        """The loss and the logs behind the last pass of a batch, of all ranks; collective.

        ``calls`` come with the microbatch's share, its stage and its number; ``rows`` are those of
        this replica's batch.
        """
        copies = self.placement.weight_copies
        entries = [LogEntry(call, share, stage, m % copies) for call, share, stage, m in calls]
        joins = self.coordinates.dp > 1
        bulletin = self._world_bulletin if joins else self._bulletin
        bulletin.post([0, loss, start_packing(entries)(), None, None, rows])
        return self._joined(self._by_replica(bulletin.read(), joins), StepResult(), rows=joins)

    def _by_replica(self, answers: list[Any], joins: bool) -> list[list[Any]]:
        where = self.coordinates
        if not joins:
            return [answers]
        return [[answers[r] for r in where.replica(d)] for d in range(where.dp)]

    def _run(
        self,
        batch: Any,
        options: PassOptions,
        *,
        step: int,
        update: bool,
        loaders: TreeSpec | None,
        backward: bool = True,
    ) -> PassResult:
        count = len(split_batch(batch, self.plan.num_microbatches, loaders))
        if self.coordinates.exchanges_across:
            self._refuse_other_counts(count)
        full = count == self.plan.num_microbatches
        programs = self.programs if full else compile_short(self.plan, count)
        if options.mode != "train" or not backward:
            program = programs.forward
        else:
            program = programs.alone if update else programs.accumulate
        hear = self._begin_pass(batch, options, program, step=step, update=update, loaders=loaders)
        return hear()

    def _begin_pass(
        self,
        batch: Any,
        options: PassOptions,
        program: Program,
        *,
        step: int,
        update: bool,
        loaders: TreeSpec | None,
        stream: Stream | None = None,
    ) -> Callable[[], PassResult]:
        """Runs a list; what it returns waits for what the other ranks say, and puts it together."""
        train = options.mode == "train"
        microbatches = split_batch(batch, self.plan.num_microbatches, loaders)
        if train and not self._compared and self.coordinates.world_size > 1:
            self._compared = True
            self._compare_shapes(microbatches)
        if not options.part:
            self._draws.look(
                batch, microbatches, options, loaders, whole=self.whole,
                then=self.whole.compare_layers if train else None,
            )  # fmt: skip
        if self.plan.loss_over == "batch":
            self._compare_rows(batch, microbatches, options, loaders)
        marks = self.options.check_batches and self.control_group is not None
        mark = start_checksum(batch) if marks else lambda: 0
        previous = self.recorder.kept[-1] if self.recorder.kept else None
        joins = train and self.coordinates.dp > 1
        bulletin = self._world_bulletin if joins else self._bulletin
        carries = options.mode in self.whole.carried
        rows = count_rows(batch, loaders)
        whole = Whole()
        self.whole.begin(batch, microbatches, options)

        def read(slot: Slot) -> bool:
            place = self.model.last_place(options.mode)
            own = StepState(self.model.module, self.model.layers())
            return self._draws.reads(
                batch, microbatches, options, state=own, slot=slot, place=place
            )

        shares: list[Callable[[], None]] = []

        def share_later(result: StepResult) -> None:
            nonlocal whole
            with default_group(self._parts.replicas):
                whole, entries = self.whole.end(result.logs, result.loss)
            loss = None if result.loss is None else Fetch(result.loss)
            logs = start_packing(entries)

            def share() -> None:
                value = None if loss is None else float(loss.tensor())
                said = self.mirror.message(whole, carries=carries, read=read)
                times = self._times(previous)
                stops = stream is not None and stream.asked_to_stop
                bulletin.post([mark(), value, logs(), times, said, rows, stops])

            shares.append(share)
            if not self._runs_ahead:
                shares.pop()()

        drawn = None
        if not options.part:
            drawn = self._draws.deal(
                batch, microbatches, options, loaders,
                seed=self.seed_of(step), state=self.whole.state,
            )  # fmt: skip
        while True:
            try:
                with kept_generators():
                    result = self._executor.run(
                        program,
                        microbatches,
                        options,
                        step=step,
                        forwards_done=share_later,
                        stream=stream,
                        verdict=self._confirm if self.late.open else None,
                    )
                break
            except UpdateUndone:
                self._executor.abandon(program)
                self.late.repair()
                self._gradients.attach(zero=True)
                self.whole.begin(batch, microbatches, options)
        if drawn is not None:
            drawn.put_back()
        for share in shares:
            share()

        def hear() -> PassResult:
            self.pulse.phase(Phase.SHARING)
            replicas = self._by_replica(bulletin.read(), joins)
            answers = replicas[self.coordinates.dp_rank if joins else 0]
            self.pulse.phase(Phase.UPDATING if train and update else Phase.BETWEEN)
            if not (train and update) and stream is None:
                # Without an optimizer step the pass ends here; only training steps are kept.
                self.recorder.finish(keep=False)
            self._check_same([answer[0] for answer in answers])
            self._note([answer[3] for answer in answers])
            said = next((answer[4] for answer in answers if answer[4] is not None), None)
            self.mirror.take(said)
            self.mirror.share(now=True)
            if options.mode in self.mirrored:
                self.mirror.share()
            if stream is not None:
                stream.stops = stream.stops or any(a[6] for each in replicas for a in each)
            if stream is not None and said is not None:
                stream.waits = True  # The step changes what other stages may read in the next one.
            joined = self._joined(replicas, result, rows=joins)
            if carries:
                joined.output = self.mirror.carry(said, whole.result)
            return joined

        return hear

    def _refuse_other_counts(self, count: int) -> None:
        """Replicas that exchange tokens do so in every microbatch."""
        where = self.coordinates
        group = self.communicators.get("metrics", where.replicas((where.pp_rank,)))
        bounds = torch.tensor([count, -count])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        most, least = int(bounds[0]), -int(bounds[1])
        if most != least:
            raise DataError(
                f"replicas have from {least} to {most} microbatches of this batch, and with "
                f"ep={where.ep} over dp={where.dp} replicas they exchange tokens in each. Give all "
                "replicas batches of as many rows (drop_last=True), or use ep=1."
            )

    def _compare_shapes(self, microbatches: Sequence[Microbatch]) -> None:
        """Refuses a first batch that ranks of a pipeline see in different shapes or types.

        Replicas may have different ones; but all have to hear that some pipeline has been refused.
        """
        replica = f"replica {self.coordinates.dp_rank}, " if self.coordinates.dp > 1 else ""
        found = {f"{replica}microbatch {m}": p.signature for m, p in enumerate(microbatches)}
        compare(shared_print(found), what="first batch", partial=True)

    def _compare_rows(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        loaders: TreeSpec | None,
    ) -> None:
        """Refuses, on all ranks, values that cannot be put together for one loss."""
        step = options.step_of(batch)
        if step in self._joined_steps:
            return
        refused: ModelError | None = None
        if len(microbatches) > 1:
            try:
                self._compare_pair(batch, microbatches, options, loaders)
            except ModelError as error:
                refused = error
            self._joined_steps.add(step)
        if self.coordinates.world_size > 1 and step not in self._heard_steps:
            self._heard_steps.add(step)
            anywhere = torch.tensor(int(refused is not None))
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            if refused is None and bool(anywhere):
                refused = ModelError("loss_over=batch: another rank has refused its first batch.")
        if refused is not None:
            raise refused

    def _compare_pair(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        loaders: TreeSpec | None,
    ) -> None:
        if loaders is not None:
            raise ModelError(
                "loss_over=batch with several training loaders, whose batches have rows of their "
                "own: nobody knows which of them a value has. Use one loader of pairs, or "
                "loss_over=microbatch."
            )
        first, second, *_ = share_sizes(count_rows(batch), len(microbatches))
        with default_group(self._parts.replicas), kept_generators():
            self.model.compare_rows(
                options.mode,
                first_rows(batch, first + second),
                microbatches[1].data,
                (first, second),
                options.dataloader_idx,
            )

    def _joined(
        self, replicas: list[list[list[Any]]], result: StepResult, *, rows: bool
    ) -> PassResult:
        where = self.coordinates
        # All sharers of a stage know the same.
        pipelines = [answers[where.tp_rank :: where.tp] for answers in replicas]
        loss = self._mean_loss(replicas)
        logs = [unpack_logs([answer[2] for answer in answers]) for answers in pipelines]
        results = [result.results[key] for key in sorted(result.results)]
        if not rows:
            return PassResult(loss, logs[0], results)
        total = sum(answers[0][5] for answers in pipelines)
        return PassResult(loss, join_replicas(logs, where.dp_rank), results, rows=total)

    def _mean_loss(self, replicas: list[list[list[Any]]]) -> float | None:
        where = self.coordinates
        pipelines = [answers[where.tp_rank :: where.tp] for answers in replicas]
        losses = [
            sum(answer[1] for answer in answers if answer[1] is not None)
            for answers in pipelines
            if any(answer[1] is not None for answer in answers)
        ]
        return sum(losses) / len(losses) if losses else None

    def _check_same(self, marks: list[int]) -> None:
        if len(set(marks)) > 1:
            tp = self.coordinates.tp
            listing = ", ".join(
                f"rank {place // tp}" + (f" tp {place % tp}" if tp > 1 else "") + f": {mark:08x}"
                for place, mark in enumerate(marks)
            )
            raise DataError(
                "the ranks of one pipeline see different batches (checksums "
                f"{listing}). The data order must not depend on the global random state: give the "
                "loader a seeded generator or sampler, or set check_batches=False if the batches "
                "differ on purpose."
            )

    def last_stats(self) -> StepStats | None:
        """Figures of the last training step itself; collective, at the end of training."""
        record = self.recorder.kept[-1] if self.recorder.kept else None
        self._bulletin.post(self._times(record))
        self.pulse.phase(Phase.SHARING)
        self._note(self._bulletin.read())
        self.pulse.phase(Phase.BETWEEN)
        return self.stats

    def _times(self, record: StepRecord | None) -> RankStep | None:
        if record is None:
            return None
        norm = self._flush.noted_squared_norm()
        spans = self.recorder.spans(record)
        return RankStep(
            step=record.step,
            begun=spans.begun,
            finished=spans.finished,
            squared_norm=norm,
            busy_s=spans.busy,
            computed=spans.computed,
            reduced=spans.reduced,
            peak_bytes=self._memory.peak_bytes(),
        )

    def _note(self, said: Sequence[Sequence[Any] | None]) -> None:
        self.stats = joined_stats(said, tp=self.coordinates.tp) or self.stats
