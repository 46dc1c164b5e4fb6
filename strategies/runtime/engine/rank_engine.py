"""One rank of a running pipeline: model, programs, gradients and messages brought together.

Knows no Lightning; ``strategy.py`` calls it from Lightning's hooks, tests call it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec

from strategies.compiler import compile_plan
from strategies.errors import ModelError
from strategies.heartbeat import Phase
from strategies.ir.kinds import Kind
from strategies.ir.program import Program
from strategies.models.collectives import default_group
from strategies.models.logs import LogEntry, start_packing, unpack_logs
from strategies.models.manual.segments import SegmentModel
from strategies.models.nested import structure
from strategies.models.replay.cut_module import CutModule
from strategies.models.stage_model import STEP_NAMES, LogCall, Mode, Step
from strategies.models.state import Generators, kept_generators, seed_all
from strategies.models.uncut_model import UncutModel, tell_uncut, uncut_plan
from strategies.runtime.engine.last_batches import check_ends
from strategies.runtime.engine.rank_passes import PassResult, RankPasses
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.step.activation_bytes import ActivationBytes
from strategies.runtime.step.microbatch import (
    Microbatch,
    split_batch,
)
from strategies.runtime.step.recorder import StepStats
from strategies.runtime.step.stage_compute import PassOptions, StepResult


class Engine(RankPasses):
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
            self.stream.put_away()
            self._gradients.add_hooks()  # This batch runs by itself.
            self._parts.gradients = self._gradients.stages
            self._flush.take(self._gradients)
        self._flush.catch_up()
        # The same rule by which Lightning clears gradients, and as often as it calls the closure.
        fresh = batch_idx % accumulation == 0
        if fresh:
            if self._weights.trained() != self._trained:
                self.late.settle()
            self._follow_freezing()
            self.mains.relink()
            if self._parts.watch is not None:
                self._parts.watch.begin(keep=self.late.open)
            if self.tokens is not None:
                self.tokens.begin(accumulation * self.coordinates.dp)
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
        before, self._began = Generators.now(), False
        try:
            result = self._run(batch, options, step=step, update=update, loaders=loaders)
        except ModelError as why:
            if not self.is_alone or (self._began and not fresh):
                raise
            before.put_back()
            self.run_whole(why)
            self._gradients.attach(zero=fresh)
            result = self._run(batch, options, step=step, update=update, loaders=loaders)
        if update:
            self._flush.owe(1.0 if self.tokens is None else self.tokens.factor)
        # Lightning clears gradients after this and before backward(): keep ours out of its reach.
        self._gradients.detach()
        if self.stream is not None:
            self.stream.left = self._gradients
        return result

    @property
    def is_alone(self) -> bool:
        """Whether this rank has a whole model in one stage, and updates it behind each batch."""
        where = self.coordinates
        one = where.pp == where.tp == where.ep == self.placement.num_stages == 1
        return one and self.stream is None and isinstance(self.model, CutModule | SegmentModel)

    def run_whole(self, why: ModelError) -> None:
        """Training steps run whole from now on; what this one has done is taken back."""
        module = self.model.module
        self.whole.state.restore()
        tell_uncut(module, why)
        self.model = self._parts.model = UncutModel(module, why, trains=True)
        self.whole.run_whole(self.model)
        self._numbers.run_whole()
        self.plan = uncut_plan(self.plan)
        self.programs = compile_plan(self.plan)

    # ---------------------------------------------------------------- training without a flush

    def streams(self, batch: Any, loaders: TreeSpec | None) -> bool:
        """Whether a batch may enter behind those that are under way.

        One that gives fewer microbatches than a batch of the program, or others than those under
        way, runs by itself: from an empty pipeline to an empty one, with its own update.
        """
        if self.stream is None:
            return False
        microbatches = split_batch(batch, self.plan.num_microbatches, loaders)
        return self.stream.takes([m.signature for m in microbatches])

    def stream_pass(
        self,
        batch: Any,
        *,
        batch_idx: int,
        step: int,
        wait: bool,
        accumulation: int = 1,
        factor: float = 1.0,
        loaders: TreeSpec | None = None,
    ) -> tuple[list[PassResult], Callable[[], float | None]]:
        """Lets a batch in, and runs what else is to run before the next one.

        Arguments are those of ``train_pass``; ``wait`` for what this call says itself.

        Returns:
            What earlier calls have said and, with ``wait``, this one; and this one's loss, to be
            looked at by whoever likes to wait for it.
        """
        stream = self.stream
        assert stream is not None
        behind = batch_idx % accumulation
        if stream.empty:
            self.mains.complete()  # What a batch by itself has updated, no call would gather.
        if stream.empty and not behind:
            self._follow_freezing()
            self.mains.relink()
        elif self._weights.trained() != self._trained:
            raise ModelError(
                "parameters were frozen or unfrozen while an update is under way "
                f"(schedule={self.plan.schedule}). Do it at the beginning of an epoch."
            )
        if self._parts.watch is not None:
            self._parts.watch.turn(behind=bool(behind))
        self._flush.expect(None)
        scale = factor / (accumulation * self.coordinates.dp)
        options = PassOptions(
            batch_idx, "train", scale, None, self.seed_of(step), None, batch=batch
        )
        first = stream.empty
        microbatches = split_batch(batch, self.plan.num_microbatches, loaders)
        program = stream.enter([m.signature for m in microbatches], behind=behind)
        stream.continue_sum()
        update = any(item.kind is Kind.STEP for row in program.ranks for item in row)
        hear = self._begin_pass(
            batch, microbatches, options, program, step=step, update=update, loaders=loaders,
            stream=stream,
        )  # fmt: skip
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
        with default_group(self._parts.replicas), kept_generators():
            self._executor.run(
                program, (), options, step=-1, forwards_done=lambda _: None, stream=stream
            )
        stream.pause_sum()

    def make_room(self) -> None:
        """Right before an optimizer's step: it writes no weights that microbatches still need."""
        if self.stream is None or self.stream.due is None:
            return
        assert self._parts.versions is not None
        left = self._parts.versions.make_room()
        if self.feedback is not None:
            self.feedback.begin(left)

    def drained(self) -> None:
        """Ends a drain: nothing is under way, and the weights are whole; collective."""
        assert self.stream is not None
        self.drain()
        self.mains.complete()
        self.stream.drained()
        self._gradients = self.stream.sums[0]
        if self.stream.left is not None and not self.mains:
            self.stream.left.attach(zero=False)

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

    def refusal(
        self,
        batch: Any,
        *,
        mode: Mode,
        batch_idx: int,
        dataloader_idx: int | None,
        loaders: TreeSpec | None,
    ) -> ModelError | None:
        """Why a step cannot be cut for an evaluation batch; None where it can.

        Alike on a pipeline's ranks; collective where batches may differ in it.
        """
        step = (mode, dataloader_idx or 0, structure(batch))
        known = step in self._uncut
        if known and self._uncut[step] is not None:
            return self._uncut[step]
        microbatches = split_batch(batch, self.plan.num_microbatches, loaders)
        options = PassOptions(batch_idx, mode, 1.0, None, None, dataloader_idx, batch=batch)
        before = Generators.now()
        self.whole.note()
        try:
            with default_group(self._parts.replicas):
                why = self.model.refusal(mode, microbatches[0].data, batch_idx, dataloader_idx)
        finally:
            before.put_back()
            self.whole.state.restore()
        mixes = None
        if why is None and not known:
            mixes = self._mixing(batch, microbatches, options, loaders)
        # It depends on what has happened so far, which no rank may see differently.
        refused = Exchange(self.control_group).everyone(why is not None)
        if why is None and any(refused):
            why = ModelError(
                f"another rank cannot cut {STEP_NAMES[mode]} for this batch. Let it depend on the "
                "batch and its number alone, which all ranks see alike."
            )
        if why is None:
            self._uncut[step] = mixes
        return why or mixes

    def _mixing(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        loaders: TreeSpec | None,
    ) -> ModelError | None:
        """Why microbatches of evaluation do not give what the batch gives, by a look at one."""
        found: ModelError | None = None

        def look(step: Step, whole: Any, parts: Sequence[Any], rows: Sequence[int]) -> None:
            nonlocal found
            seen = self.model.mixed_rows(step, whole, parts, rows, options.batch_idx)
            mixed, uneven = seen.line, seen.uneven
            name = STEP_NAMES[options.mode]
            if mixed is not None:
                found = ModelError(
                    f"{mixed}: {name} mixes rows of the batch between its layers: what this layer "
                    "gets for a row depends on the others, and microbatches have some of them. Use "
                    "num_microbatches=1."
                )
            elif uneven:
                found = ModelError(
                    f"{name} logs {', '.join(uneven)} before its last layer, and no mean over "
                    "rows: microbatches have some of them. Log it behind the last layer, or use "
                    "num_microbatches=1."
                )

        try:
            self._numbers.look(
                batch, microbatches, options, loaders,
                whole=self.whole, seed=self.seed_of(0), then=look,
            )  # fmt: skip
        except ModelError as error:
            return error
        return found

    def leave_uncut(
        self, batch: Any, mode: Mode, dataloader_idx: int | None, why: ModelError
    ) -> None:
        """From now on such a step counts as one that cannot be cut."""
        self._uncut[mode, dataloader_idx or 0, structure(batch)] = why

    def share_logs(self, calls: Sequence[LogCall], output: Any) -> PassResult:
        """What a step has logged that each rank of a pipeline has run as a whole; collective.

        The last rank's numbers count.
        """
        entries = [LogEntry(call, 1.0, self.coordinates.pp_rank, 0) for call in calls]
        self._bulletin.post(start_packing(entries)())
        return PassResult(None, unpack_logs(self._bulletin.read()), [], output, uncut=True)

    # ---------------------------------------------------------------- manual optimization

    def begin_segments(self) -> None:
        """A batch begins that takes several passes, with optimizer steps wherever it likes."""
        if self._parts.watch is not None:
            self._parts.watch.begin()
        self.whole.note()

    @contextmanager
    def draws_of(self, step: int) -> Iterator[None]:
        """Around a step that runs whole: it draws from its seed, if the run has one."""
        before = Generators.now()
        if not self._numbers.steers:
            seed_all(self.seed_of(step))
        yield
        if not self._numbers.steers:
            before.put_back()

    def number_segments(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        loaders: TreeSpec | None,
        *,
        batch_idx: int,
        step: int,
        way: int,
        check: Callable[[Step, Any, Sequence[Any], Sequence[int]], None],
    ) -> None:
        """What all passes of a batch draw from, until ``end_segments``.

        ``check`` looks at a way through the step when it is taken for the first time.
        """
        options = PassOptions(batch_idx, "train", 1.0, None, None, None)
        self._numbers.look(
            batch, microbatches, options, loaders,
            whole=self.whole, seed=self.seed_of(step), way=way, then=check,
        )  # fmt: skip
        self._numbers.begin(batch, microbatches, options, loaders, self.seed_of(step), None)

    def end_segments(self) -> None:
        """The steps of such a batch have come to their end."""
        self._numbers.end()

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
        self.continue_sum()
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
        bulletin.post([0, loss, start_packing(entries)(), None, None, rows, self.ends])
        replicas = self._by_replica(bulletin.read(), joins)
        check_ends(replicas, self.coordinates, "train")
        return self._joined(replicas, StepResult(), rows=joins)

    def last_stats(self) -> StepStats | None:
        """Figures of the last training step itself; collective, at the end of training."""
        self._bulletin.post(self._times(self._last_step()))
        self.pulse.phase(Phase.SHARING)
        self._note(self._bulletin.read())
        self.pulse.phase(Phase.BETWEEN)
        return self.stats
