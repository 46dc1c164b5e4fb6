"""The state of a rank between two steps of a training loop without a flush.

Which step this is and which list it runs; the microbatches that are under way; and the sums of
gradients of updates that are not applied yet, each in buffers of its own, so that one is reduced
over the replicas while the backwards of the next batch add to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, Kind
from strategies.ir.program import Program, recomputed_pairs
from strategies.ir.versions import gradient_sums
from strategies.lowering.steps import StreamSteps
from strategies.runtime.step.boundary_values import BoundaryValues
from strategies.runtime.step.rank_parts import RankParts
from strategies.runtime.step.stage_compute import UnderWay
from strategies.runtime.update.grad_sync import StageGradients
from strategies.runtime.update.weight_versions import WeightVersions

if TYPE_CHECKING:
    from strategies.runtime.update.rank_gradients import RankGradients


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a stream a list runs.

    Attributes:
        steps: What each step runs.
        fill: How often the pipeline had been empty when the stream began.
        number: The step's, counted from there; of a drain, that of the step which does not come.
        entered: Batches that had entered, that of this step included.
    """

    steps: StreamSteps
    fill: int
    number: int
    entered: int

    def counted(self, item: Instruction) -> Instruction:
        """With its microbatch, or its version, counted from where the stream began."""
        if item.microbatch is None:
            assert item.version is not None
            version = item.version + self.steps.updates_before(self.number)
            return replace(item, version=version, after=())
        newest = self.entered * self.steps.updates.per_step - 1
        microbatch = newest - (newest - item.microbatch) % self.steps.microbatch_slots
        return replace(item, microbatch=microbatch, version=None, after=())

    def window(self, whole: Program, first: int) -> list[list[Instruction]] | None:
        """A stream's lists as ``counted`` says them, if it were what begins with batch ``first``.

        None where an update has gradients of batches on both sides of that beginning.
        """
        steps, shift = self.steps, first * self.steps.updates.per_step
        before = steps.updates_before(first)
        if steps.updates.first(before) != shift:
            return None

        def moved(item: Instruction) -> Instruction:
            if item.microbatch is None:
                assert item.version is not None
                return replace(item, version=item.version + before, after=())
            return replace(item, microbatch=item.microbatch + shift, version=None, after=())

        return [[moved(item) for item in row] for row in whole.ranks]


class Stream:
    """One rank's side of a stream of batches.

    Args:
        steps: What each step runs.
        rank: The pipeline rank.
        parts: Its ``gradients`` are those that backwards add to, which change within a step.
    """

    def __init__(self, steps: StreamSteps, rank: int, parts: RankParts) -> None:
        self.under_way = UnderWay()
        self.unread: deque[Callable[[], Any]] = deque()  # what steps have said, oldest first
        self.waits = False  # whether a step is to wait for what it says itself
        self.asked_to_stop = False  # whether this process has been asked to end
        self.stops = False  # whether any has, as all have heard in the same step
        # After a drain, what people's hooks find where gradients are: those of the last update, or
        # of one that lacks some of its batches.
        self.left: RankGradients | None = None
        self._whole = steps  # where updates begin with the first batch
        self._steps = steps
        self._rank = rank
        self._parts = parts
        self._count = 0  # of batches that have entered since the pipeline was empty
        self._fill = 0  # how often it has been
        self.place = Place(steps, 0, 0, 0)  # of the list that runs
        self._signature: Any = None  # of their microbatches
        self._values: BoundaryValues | None = None
        self.sums: list[RankGradients] = []  # buffers, one set per update under way
        self._adding: int | None = None  # the update that backwards add to
        self._due: int | None = None  # the update that is to be applied
        self._base = 0  # the update that versions in the list that runs are counted from
        # (stage, label) that keep their input only: their R may stand in the list of a later step.
        self.recomputed: frozenset[tuple[int, int | None]] = frozenset(
            (stage, microbatch % steps.microbatch_slots)
            for stage, microbatch in recomputed_pairs(steps.program)
        )
        # Asks for the verdict on complete sums, which are attached; None to wait at the update.
        self.ask: Callable[[RankGradients], None] | None = None
        self._complete: int | None = None  # the update that is to be asked for next
        self._reduces = any(i.kind is Kind.REDUCE for row in steps.program.ranks for i in row)
        self.num_sums = gradient_sums(steps.program)[rank]

    # ---------------------------------------------------------------- steps

    @property
    def empty(self) -> bool:
        return self._count == 0

    def updates_next(self, *, behind: int) -> bool:
        """Whether any rank has an update to apply at the end of the next step.

        ``behind`` as in ``enter``.
        """
        steps = self._whole.resuming(behind) if self.empty else self._steps
        program = steps.step(self._count)
        return any(item.kind is Kind.STEP for row in program.ranks for item in row)

    def takes(self, signature: Any) -> bool:
        """Whether a batch can enter behind those that are under way: it looks like them."""
        return len(signature) == self._steps.updates.per_step and self._signature in (
            None,
            signature,
        )

    def enter(self, signature: Any, *, behind: int) -> Program:
        """The next batch enters; the list of that step.

        ``behind``: how many batches its update has already; counts where the pipeline is empty.
        """
        if self.empty:
            self.put_away()
            self._fill += 1
            self._steps = self._whole.resuming(behind)
            self._adding = 0 if behind else None
            if self._parts.versions is not None:
                self._parts.versions.settle()  # Somebody may have put weights elsewhere.
        program = self._steps.step(self._count)
        self._base = self._steps.updates_before(self._count)
        self._expect(program)
        self.place = Place(self._steps, self._fill, self._count, self._count + 1)
        self._count += 1
        self._signature = signature
        return program

    def drains(self, *, closes: bool = True) -> Sequence[Program]:
        """The lists that empty the pipeline, to be run in turn, each ``begun`` first.

        One that ``closes`` applies what there is of an update that takes more batches.
        """
        return self._steps.drain(self._count, closes=closes)

    def begin_drain(self, program: Program) -> None:
        self._base = self._steps.updates_before(self._count)
        self.place = Place(self._steps, self._fill, self._count, self._count)
        self._expect(program)

    def _expect(self, program: Program) -> None:
        versions = [i.version for i in program.ranks[self._rank] if i.kind is Kind.STEP]
        self._due = None if not versions or versions[0] is None else versions[0] - 1 + self._base

    def drained(self) -> None:
        """Nothing is under way any more; an update that takes more batches has its first sums."""
        assert not self.under_way.graphs and not self.unread
        update = self._steps.updates_before(self._count)
        first = update % len(self.sums)
        self.sums = self.sums[first:] + self.sums[:first]
        begun = self._steps.updates.first(update) < self._count * self._steps.updates.per_step
        self.left = self.sums[0 if begun else -1]
        self._count = 0
        self._signature = self._values = self._adding = self._due = None
        if self._parts.versions is not None:
            self._parts.versions.settle()

    def put_away(self) -> None:
        """Takes from the parameters what a drain has left to be looked at."""
        if self.left is not None:
            self.left.detach()
            self.left = None

    @property
    def shown(self) -> RankGradients | None:
        """The sums that are where people look for gradients; None for none."""
        return self.left if self.empty else self.due

    def labels(self) -> range:
        """What the lists call the microbatches of the batch that has entered last."""
        first = (self._count - 1) * self._steps.updates.per_step % self._steps.microbatch_slots
        return range(first, first + self._steps.updates.per_step)

    def values(self, program: Program, parts: RankParts) -> BoundaryValues:
        if self._values is None:
            self._values = BoundaryValues(program, parts.mailbox, parts.pulse)
        self._values.continue_with(program)
        return self._values

    # ---------------------------------------------------------------- gradients

    def keep(self, sums: list[RankGradients], versions: WeightVersions) -> None:
        """Takes the buffers of gradients, one per update under way; all are detached."""
        self.sums = sums
        self._adding = None
        self._parts.versions = versions
        for gradients in sums:
            gradients.remove_hooks()
            gradients.detach()

    def continue_sum(self) -> None:
        """Puts gradients where the backwards of a step add to them."""
        if self._adding is not None:
            self._of(self._adding).add_hooks()
            self._of(self._adding).attach(zero=False)

    def pause_sum(self) -> None:
        """Takes them away, out of Lightning's and the optimizer's reach."""
        if self._adding is not None:
            self._of(self._adding).remove_hooks()
            self._of(self._adding).detach()

    def turn_to(self, item: Instruction) -> None:
        """Lets gradients add up for the update that an instruction belongs to."""
        for part in item.parts:
            if part.microbatch is None or part.kind in (Kind.SEND, Kind.RECV):
                continue
            # The loss of a forward marks the sums that its backward adds to.
            last = part.kind is Kind.F and part.stage == len(self._steps.program.ranks) - 1
            if part.kind in GRADIENT_KINDS or last:
                update = self._update_of(part.microbatch)
                if update != self._adding:
                    self.pause_sum()
                    self._adding = update
                    gradients = self._of(update)
                    gradients.add_hooks()
                    gradients.attach(zero=True)
                    self._parts.gradients = gradients.stages

    def behind(self, item: Instruction) -> None:
        """Asks for the verdict on an update behind its last gradient, which has run.

        What is reduced has the time of one more computation to arrive. So all ranks have asked when
        the first one comes to the update, and nobody waits for another there.
        """
        if self.ask is None:
            return
        if self._complete is not None:
            self._ask(self._complete)
        for part in item.parts:
            if part.microbatch is None or part.kind not in GRADIENT_KINDS:
                continue
            updates, microbatch = self._steps.updates, self._microbatch(part.microbatch)
            update = updates.of(microbatch)
            if microbatch == updates.first(update + 1) - 1:
                self._complete = update
                self._of(update).start_shared()
                if not self._reduces:
                    self._ask(update)

    def _ask(self, update: int) -> None:
        assert self.ask is not None
        self._complete = None
        self.pause_sum()
        self._of(update).attach(zero=False)
        self.ask(self._of(update))
        self._of(update).detach()
        self.continue_sum()

    def ask_due(self) -> None:
        """Asks for what is due, if it has got complete just now; it is attached."""
        if self.ask is not None and self._complete is not None and self._complete == self._due:
            self._complete = None
            self.ask(self._of(self._due))

    def gradients_of(self, item: Instruction) -> StageGradients:
        """What a REDUCE reduces."""
        assert item.version is not None
        return self._of(item.version - 1 + self._base).stages[item.stage]

    @property
    def due_update(self) -> int | None:
        """Which update this rank is to apply now, counted from an empty pipeline."""
        return self._due

    @property
    def newest_update(self) -> int:
        """The first update that the batch makes which has entered last."""
        return self._steps.updates_before(self._count - 1)

    @property
    def due(self) -> RankGradients | None:
        """The gradients of the update that this rank is to apply now."""
        return None if self._due is None else self._of(self._due)

    def applied(self) -> None:
        if self._due is not None:
            self._of(self._due).detach()
        self._due = None

    def _of(self, update: int) -> RankGradients:
        return self.sums[update % len(self.sums)]

    def _update_of(self, label: int) -> int:
        return self._steps.updates.of(self._microbatch(label))

    def _microbatch(self, label: int) -> int:
        """Counted from an empty pipeline."""
        newest = self._count * self._steps.updates.per_step - 1
        return newest - (newest - label) % self._steps.microbatch_slots
