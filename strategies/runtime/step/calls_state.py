"""The state of a rank between two calls of a training loop without a flush.

Which call this is and which list it runs; the microbatches that are under way; and the sums of
gradients of updates that are not applied yet, each in buffers of its own, so that one is reduced
over the replicas while the backwards of the next batch add to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, Kind
from strategies.ir.program import Program, recomputed_pairs
from strategies.ir.versions import gradient_sums
from strategies.lowering.stream import Calls
from strategies.runtime.step.boundary_values import BoundaryValues
from strategies.runtime.step.rank_parts import RankParts
from strategies.runtime.step.stage_compute import UnderWay
from strategies.runtime.update.grad_sync import StageGradients
from strategies.runtime.update.weight_versions import WeightVersions

if TYPE_CHECKING:
    from strategies.runtime.update.rank_gradients import RankGradients


class Stream:
    """One rank's side of a stream of batches.

    Args:
        calls: What each call runs.
        rank: The pipeline rank.
        parts: Its ``gradients`` are those that backwards add to, which change within a call.
    """

    def __init__(self, calls: Calls, rank: int, parts: RankParts) -> None:
        self.under_way = UnderWay()
        self.unread: deque[Callable[[], Any]] = deque()  # what calls have said, oldest first
        self.waits = False  # whether a call is to wait for what it says itself
        self.asked_to_stop = False  # whether this process has been asked to end
        self.stops = False  # whether any has, as all have heard in the same call
        self._calls = calls
        self._rank = rank
        self._parts = parts
        self._count = 0  # of batches that have entered since the pipeline was empty
        self._signature: Any = None  # of their microbatches
        self._values: BoundaryValues | None = None
        self.sums: list[RankGradients] = []  # buffers, one set per update under way
        self._adding: int | None = None  # the update that backwards add to
        self._due: int | None = None  # the update that is to be applied
        self._base = 0  # the update that versions in the list that runs are counted from
        # (stage, label) that keep their input only: their R may stand in the list of a later call.
        self.recomputed: frozenset[tuple[int, int | None]] = frozenset(
            (stage, microbatch % calls.num_labels)
            for stage, microbatch in recomputed_pairs(calls.program)
        )
        self.num_sums = gradient_sums(calls.program)[rank]

    # ---------------------------------------------------------------- calls

    @property
    def empty(self) -> bool:
        return self._count == 0

    @property
    def updates_next(self) -> bool:
        """Whether any rank has an update to apply at the end of the next call."""
        program = self._calls.call(self._count)
        return any(item.kind is Kind.STEP for row in program.ranks for item in row)

    def takes(self, signature: Any) -> bool:
        """Whether a batch can enter behind those that are under way: it looks like them."""
        return len(signature) == self._calls.per_call and self._signature in (None, signature)

    def enter(self, signature: Any) -> Program:
        """The next batch enters; the list of that call."""
        program = self._calls.call(self._count)
        self._base = self._count * self._calls.per_call // self._calls.lateness.per_update
        self._expect(program)
        self._count += 1
        self._signature = signature
        return program

    def drains(self) -> Sequence[Program]:
        """The lists that empty the pipeline, to be run in turn, each ``begun`` first."""
        return self._calls.drain(self._count)

    def begin_drain(self, program: Program) -> None:
        self._base = self._count * self._calls.per_call // self._calls.lateness.per_update
        self._expect(program)

    def _expect(self, program: Program) -> None:
        versions = [i.version for i in program.ranks[self._rank] if i.kind is Kind.STEP]
        self._due = None if not versions or versions[0] is None else versions[0] - 1 + self._base

    def drained(self) -> None:
        """Nothing is under way any more."""
        assert not self.under_way.graphs and not self.unread
        self._count = 0
        self._signature = self._values = self._adding = self._due = None
        if self._parts.versions is not None:
            self._parts.versions.settle()

    def labels(self) -> range:
        """What the lists call the microbatches of the batch that has entered last."""
        first = (self._count - 1) * self._calls.per_call % self._calls.num_labels
        return range(first, first + self._calls.per_call)

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
        """Puts gradients where the backwards of a call add to them."""
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
            last = part.kind is Kind.F and part.stage == len(self._calls.program.ranks) - 1
            if part.kind in GRADIENT_KINDS or last:
                update = self._update_of(part.microbatch)
                if update != self._adding:
                    self.pause_sum()
                    self._adding = update
                    gradients = self._of(update)
                    gradients.add_hooks()
                    gradients.attach(zero=True)
                    self._parts.gradients = gradients.stages

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
        return (self._count - 1) * self._calls.per_call // self._calls.lateness.per_update

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
        newest = self._count * self._calls.per_call - 1
        microbatch = newest - (newest - label) % self._calls.num_labels
        return microbatch // self._calls.lateness.per_update
