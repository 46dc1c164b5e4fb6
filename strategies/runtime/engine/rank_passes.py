"""One pass of a rank: the batch cut, the list run, and what is said to the other ranks around it.

Loss, logs and the last step's times travel in one message of each rank, posted behind its last
forward and read at the end of its list. What ranks of a pipeline must have in common of a batch is
compared here, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils._pytree import TreeSpec

from strategies.compiler import compile_plan
from strategies.errors import DataError, ModelError
from strategies.heartbeat import Phase
from strategies.ir.program import Program
from strategies.models.collectives import default_group
from strategies.models.logs import join_replicas, start_packing, unpack_logs
from strategies.models.replay.step_paths import Followed
from strategies.models.snapshot import Snapshot, StateRef
from strategies.models.stage_model import LogCall
from strategies.models.state import Fetch, Generators, kept_generators, seed_all
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks
from strategies.runtime.engine.last_batches import DIVIDE, check_ends
from strategies.runtime.engine.rank_weights import RankWeights
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.fingerprint import compare, shared_print
from strategies.runtime.step.microbatch import (
    Microbatch,
    count_rows,
    first_rows,
    share_sizes,
    split_batch,
    start_checksum,
)
from strategies.runtime.step.recorder import RankStep, StepRecord, joined_stats
from strategies.runtime.step.stage_compute import PassOptions, StepResult
from strategies.runtime.step.stream_state import Stream
from strategies.runtime.step.whole_batch import Whole
from strategies.runtime.update.post_validation import UpdateUndone

_MANY_WAYS = 24
_PATIENCE_S = 3.0  # longer waits are said
_log = logging.getLogger(__name__)


@dataclass
class PassResult:
    """A pass as all ranks of the pipeline see it."""

    loss: float | None  # mean over all replicas' batches; None when the step returned none
    logs: list[LogCall]  # one call per logged name
    results: list[Any]  # return values per microbatch; on the last stage's rank only
    output: Any = None  # the step's return value for the batch, on every rank, if hooks look at it
    rows: int | None = None  # of all replicas' batches; None where ``logs`` are this replica's
    uncut: bool = False  # whether each rank has run the whole step: ``output`` is what it returned


class RankPasses(RankWeights):
    """Runs one list over a batch and puts together what all ranks have to say of it."""

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
        if self.model.uncut:
            whole = self.plan.num_microbatches
            microbatches = [Microbatch(batch, 1 / whole, 1 / whole, ())] * whole
        else:
            microbatches = split_batch(batch, self.plan.num_microbatches, loaders)
        count = len(microbatches)
        if self.tokens is not None and options.mode != "predict":  # which needs no targets
            microbatches, targets = self.tokens.weigh(microbatches)
            if self.model.uncut:
                targets /= count  # Each of them is the whole batch.
            scale = self.tokens.scale(targets) if options.mode == "train" else 1.0
            options = replace(options, targets=targets, scale=options.scale * scale)
        if self.coordinates.exchanges_across:
            self._refuse_other_counts(count)
        full = count == self.plan.num_microbatches
        if not full and options.mode == "train" and options.batch_idx == 0:
            self._tell_short(count)
        programs = self.programs if full else compile_plan(self.plan, count)
        if options.mode != "train" or not backward:
            program = programs.forward
        else:
            program = programs.single_batch if update else programs.accumulate
        hear = self._begin_pass(
            batch, microbatches, options, program, step=step, update=update, loaders=loaders
        )
        return hear()

    def _follow(
        self, microbatch: Microbatch, options: PassOptions, begin: Callable[..., None]
    ) -> tuple[PassOptions, Any]:
        """The options of a batch's way through its step, and its first microbatch's recording.

        What the step calls may depend on epoch or number; all ranks of a pipeline find it out for
        themselves. ``begin`` sets what the batch draws from.

        Raises:
            ModelError: It comes to no layer, or to others than on another rank.
        """
        batch_idx = options.batch_idx
        self.whole.note()

        def recorded() -> Followed | None:
            try:
                with default_group(self._parts.replicas):
                    return self.model.first_recording(microbatch.data, batch_idx)
            finally:
                self.whole.state.restore()

        begin(None)
        found = recorded()
        if found is not None and found.drew[0] and not self._numbers.draws:
            begin(found.drew)  # It draws, and did not do so before.
            found = recorded()
        if found is None:
            return options, None
        way = found.way
        if way is None:
            raise ModelError(
                f"training_step calls no layer for batch {batch_idx}, and a pipeline cannot leave "
                "a batch out. Leave it out in the loader (sampler, collate_fn), or run all layers "
                "and multiply the loss by zero."
            )
        if not way:
            return options, found.recording
        if way not in self._ways:
            self._agree_on(way, batch_idx)
            try:
                with default_group(self._parts.replicas), kept_generators():
                    self.model.follow_way(way, microbatch.data, batch_idx)
            finally:
                self.whole.state.restore()
        return replace(options, dataloader_idx=way), found.recording

    def _agree_on(self, way: int, batch_idx: int) -> None:
        """Waits until all ranks of the pipeline have come to a way that is new here.

        Not by a collective: one that goes the old way does not ask.
        """
        self._ways.add(way)
        if len(self._ways) == _MANY_WAYS:
            rank_zero_info(
                f"training_step has gone {_MANY_WAYS} ways, and each is looked at once, as the "
                "first step is. Layers that are left out at random train faster by a mask: "
                "x = x + keep * (layer(x) - x)."
            )
        group = self.control_group
        waits = Timer(
            _PATIENCE_S,
            _log.warning,
            (
                f"training_step does something else than before for batch {batch_idx} on this "
                f"rank, which waits up to {self._silence_s:g} s for the other ranks of the "
                "pipeline to do the same.",
            ),
        )
        waits.start()
        try:
            said: list[str | None] = [str(way)]
            if group is not None:
                said = TensorRanks(group).told(str(way), self._silence_s)
        finally:
            waits.cancel()
        if set(said) != {str(way)}:
            others = ", ".join(str(rank) for rank, word in enumerate(said) if word != str(way))
            raise ModelError(
                f"training_step does something else than before for batch {batch_idx}, and not on "
                f"rank {others} of the pipeline. Let what it does depend on the batch, its number "
                "and the epoch alone, which all ranks see alike, not on what a hook sets on one "
                "rank."
            )

    def _tell_short(self, count: int) -> None:
        """A last batch may be short; where the first one is, more was asked for than there is."""
        asked, told = self.plan.num_microbatches, self._short_told
        self._short_told = True
        if not told:
            rank_zero_info(
                f"num_microbatches={asked}, and the first batch makes {count}: a microbatch has a "
                f"row at least. The pipeline is as idle as with num_microbatches={count}; use "
                f"batches of {asked} rows or more."
            )

    def _begin_pass(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
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
        if train and not self._compared and self.coordinates.world_size > 1:
            self._compared = True
            self._compare_shapes(microbatches)
            self._tell_other_batches(batch)
        begin = partial(
            self._numbers.begin, batch, microbatches, options, loaders, self.seed_of(step)
        )
        recording = None
        if train and not options.part:
            if stream is None:
                options, recording = self._follow(microbatches[0], options, begin)
            else:
                begin(None)
            self._numbers.look(
                batch, microbatches, options, loaders, whole=self.whole,
                seed=self.seed_of(step),
                then=partial(self.whole.compare_layers, options.batch_idx),
            )  # fmt: skip
        elif not options.part:
            begin(None)
        if self.plan.loss_over == "batch" and not self.model.uncut:
            self._compare_rows(batch, microbatches, options, loaders)
        marks = self.options.check_batches and self.control_group is not None
        mark = start_checksum(batch) if marks else lambda: 0
        previous = self._last_step()
        joins = train and self.coordinates.dp > 1
        bulletin = self._world_bulletin if joins else self._bulletin
        carries = options.mode in self.whole.carried
        rows = count_rows(batch, loaders)
        way = options.dataloader_idx or 0
        whole = Whole()
        self.whole.begin(batch, microbatches, options)

        def read(ref: StateRef) -> bool:
            own = Snapshot(self.model.module, self.model.layers())
            return self._numbers.reads(microbatches, options, state=own, ref=ref)

        shares: list[Callable[[], None]] = []

        def share_later(result: StepResult) -> None:
            nonlocal whole
            with default_group(self._parts.replicas):
                whole, entries = self.whole.end(
                    result.logs, result.loss, behind=self._numbers.behind
                )
            loss = None if result.loss is None else Fetch(result.loss)
            logs = start_packing(entries, by_tokens=self.tokens is not None)

            def share() -> None:
                value = None if loss is None else float(loss.tensor())
                drawn = self._numbers.drawn()
                if whole.generators is not None and self._numbers.steers and drawn is None:
                    drawn = [whole.generators.written(host=False), []]
                said = self.mirror.message(whole, carries=carries, read=read, drawn=drawn)
                times = self._times(previous)
                stops = stream is not None and stream.asked_to_stop
                # Without a flush an update takes the rates with which its batch has come.
                looks = train and stream is None and not options.part
                rates = self.rates.mark() if looks and self.rates else 0
                bulletin.post(
                    [
                        mark(), value, logs(), times, said, rows, stops, way, rates,
                        options.targets, self.ends,
                    ]
                )  # fmt: skip

            shares.append(share)
            if not self._runs_ahead:
                shares.pop()()

        before = None
        if self.model.uncut and not self._numbers.steers:
            before = Generators.now()
            seed_all(self.seed_of(step))
        self._began = True  # From here on gradients are added up.
        kept = Snapshot(self.model.module, exact=True).take() if self.late.open else None
        while True:
            try:
                with default_group(self._parts.replicas), kept_generators():
                    result = self._executor.run(
                        program,
                        microbatches,
                        options,
                        step=step,
                        forwards_done=share_later,
                        recording=recording,
                        stream=stream,
                        verdict=self._confirm if self.late.open else None,
                    )
                break
            except UpdateUndone:
                self._executor.abandon(program)
                assert kept is not None
                kept.restore()
                self.late.repair()
                self._gradients.attach(zero=True)
                self.whole.begin(batch, microbatches, options)
        if before is not None:
            before.put_back()
        if not options.part:
            self._numbers.leave()
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
            check_ends(replicas, self.coordinates, options.mode)
            self._check_same([answer[0] for answer in answers])
            self._check_ways([answer[7] for answer in answers])
            if self.rates and len({answer[8] for each in replicas for answer in each}) > 1:
                self.rates.refuse()
            self._note([answer[3] for answer in answers])
            said = next((answer[4] for answer in answers if answer[4] is not None), None)
            self.mirror.take(said)
            if not options.part:
                self._numbers.take(None if said is None else said.get("drawn"))
            self.mirror.share(now=True)
            if options.mode in self.mirrored:
                self.mirror.share()
            if stream is not None:
                stream.stops = stream.stops or any(a[6] for each in replicas for a in each)
            if stream is not None and said is not None:
                stream.waits = True  # The step changes what other stages may read in the next one.
            if self.tokens is not None and train:
                self.tokens.add(_targets(replicas))
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

    def _tell_other_batches(self, batch: Any) -> None:
        """Of a first batch that ranks of a pipeline see with other values, if no step compares."""
        if self.options.check_batches or self.control_group is None:
            return
        marks = Exchange(self.control_group).everyone(start_checksum(batch)())
        if len(set(marks)) > 1 and dist.get_rank(self.control_group) == 0:
            _log.warning(
                "check_batches=False, and the ranks of one pipeline have different first batches: "
                "the first stage takes inputs from its own, the last one targets, and rows that "
                f"another rank has are not trained on. {DIVIDE}"
            )

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
                options.batch_idx,
            )

    def _joined(
        self, replicas: list[list[list[Any]]], result: StepResult, *, rows: bool
    ) -> PassResult:
        where = self.coordinates
        # All sharers of a stage know the same.
        pipelines = [answers[where.tp_rank :: where.tp] for answers in replicas]
        loss = self._mean_loss(replicas)
        tokens = self.tokens is not None
        logs = [
            unpack_logs([answer[2] for answer in answers], by_tokens=tokens)
            for answers in pipelines
        ]
        results = [result.results[key] for key in sorted(result.results)]
        if not rows:
            return PassResult(loss, logs[0], results)
        total = sum(answers[0][5] for answers in pipelines)
        targets = _targets(replicas) if tokens else None
        return PassResult(loss, join_replicas(logs, where.dp_rank, targets), results, rows=total)

    def _mean_loss(self, replicas: list[list[list[Any]]]) -> float | None:
        where = self.coordinates
        pipelines = [answers[where.tp_rank :: where.tp] for answers in replicas]
        losses = [
            sum(answer[1] for answer in answers if answer[1] is not None)
            for answers in pipelines
            if any(answer[1] is not None for answer in answers)
        ]
        if losses and self.tokens is not None:
            counts = _targets(replicas)
            every = sum(counts)
            if not every:
                return math.nan
            weighted = [n * each for n, each in zip(counts, losses, strict=True) if n]
            return float(sum(weighted) / every)
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
                f"{listing}). Data must not depend on the process: give the loader a seeded "
                f"generator or sampler. {DIVIDE}"
            )

    def _check_ways(self, ways: list[int]) -> None:
        if len(set(ways)) > 1:
            raise ModelError(
                "training_step called other layers on some ranks of the pipeline than on others. "
                "Let what it calls depend on the batch, its number and the epoch alone, which all "
                "ranks see alike, or use pp=1."
            )

    def _last_step(self) -> StepRecord | None:
        """The last one that was a batch's, not a drain."""
        return next((record for record in reversed(self.recorder.kept) if record.step >= 0), None)

    def _times(self, record: StepRecord | None) -> RankStep | None:
        if record is None:
            return None
        norm = self._flush.noted_squared_norm()
        spans = self.recorder.spans(record)
        return RankStep(
            step=record.step,
            begun=spans.begun,
            finished=spans.finished,
            squared_norm=None if self.applies_apart else norm,
            busy_s=spans.busy,
            computed=spans.computed,
            reduced=spans.reduced,
            peak_bytes=self.memory.peak_bytes(),
        )

    def _note(self, said: Sequence[Sequence[Any] | None]) -> None:
        flushes = self.stream is None
        stats = joined_stats(said, tp=self.coordinates.tp, flushes=flushes)
        self.stats = stats or self.stats


def _targets(replicas: Sequence[Sequence[Sequence[Any]]]) -> list[float]:
    """Of each replica's batch, where losses are means over them."""
    return [answers[0][9] for answers in replicas]
