"""What a schedule is: a name, a placement, and one function that orders the compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from strategies.errors import PlanError
from strategies.ir.instruction import Instruction
from strategies.ir.program import PLACEMENTS, Placement, Updates, bidirectional, loop, v
from strategies.plan import Plan

Rows = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True, slots=True)
class Durations:
    """How long the parts of a microbatch take, where an order is made for given costs.

    Attributes:
        forward: F per stage, > 0, in any unit.
        backward_input: I per stage.
        backward_weight: W per stage; B = I + W.
        latency: Of one message between ranks, in the same unit.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    latency: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether F = I = W on all stages and messages take no time: what papers assume."""
        values = (*self.forward, *self.backward_input, *self.backward_weight)
        return self.latency <= 1e-9 * values[0] and max(values) - min(values) <= 1e-9 * values[0]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schedule may know.

    Attributes:
        pp: P, the number of ranks.
        num_microbatches: M, >= 1.
        stages_per_rank: V, >= 1.
        group: N, microbatches that run through all virtual stages before the next N; None where
            the schedule has no groups.
        durations: For schedules that look at costs, one figure per stage of the placement; None
            for F = I = W on every stage.
        vertical_sync: Whether, without a flush, a microbatch is to use one version of the weights
            on all stages.
        accumulation: Without a flush, batches of M microbatches per update of the weights.
    """

    pp: int
    num_microbatches: int
    stages_per_rank: int
    group: int | None = None
    durations: Durations | None = None
    vertical_sync: bool = False
    accumulation: int = 1


def parse_group(group: int | str | None, schedule: Schedule) -> int | None:
    """A group as people give it; None where the compiler takes the default, or chooses.

    Raises:
        PlanError: ``auto`` for a schedule that does not choose.
    """
    if group is None or isinstance(group, int):
        return group
    if group == "auto" and schedule.chooses_group:
        return None
    grouped = "or a number" if schedule.grouped else "or no schedule.group"
    raise PlanError(
        f"schedule.group={group}: {schedule.name} does not choose its group. Try schedule=foldx, "
        f"{grouped}."
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """One entry of the registry.

    Attributes:
        name: What people type after ``schedule=``.
        order: Shape -> compute rows, one per rank.
        placement: ``loop``, ``v`` or ``bidirectional``, or a function that makes one.
        stages_per_rank: Default V.
        virtual_stages: Whether V may differ from the default.
        grouped: Whether ``schedule.group`` means something.
        weight_copies: Ranks that hold each stage; 0 for 2 if ``bidirectional``, else 1.
        chooses_group: Whether a group that is not given is chosen by simulation.
        cost_aware: Whether ``order`` looks at ``Shape.durations``.
        splits_backward: Whether ``order`` emits I and W (for all or some of the backwards).
        repeats: Whether, from a few rounds of P or N microbatches on, a list for more of them only
            repeats what is in the middle: what ranks hold at their worst moment stays the same.
        num_microbatches: M, where the order exists for one number only; None for any.
        usual: Default M; None for 2 P.
        rule: What the schedule demands of P, M, V beyond the above; raises PlanError.
        updates: For a schedule without a flush, when it updates the weights; ``order`` is then
            that of any number of batches behind each other, 1F1B.
    """

    name: str
    order: Callable[[Shape], Rows]
    placement: str | Callable[[Shape], Placement] = "loop"
    stages_per_rank: int = 1
    virtual_stages: bool = False
    grouped: bool = False
    weight_copies: int = 0
    chooses_group: bool = False
    cost_aware: bool = False
    splits_backward: bool = False
    repeats: bool = False
    num_microbatches: int | None = None
    usual: int | None = None
    rule: Callable[[Shape], None] | None = None
    updates: Callable[[Shape], Updates] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.placement, str) and self.placement not in PLACEMENTS:
            raise PlanError(
                f"placement={self.placement} of schedule={self.name} is unknown.",
                fix=f"Use {', '.join(PLACEMENTS)}, or a function that returns a Placement.",
            )
        if self.stages_per_rank < 1:
            raise PlanError(
                f"stages_per_rank={self.stages_per_rank} of schedule={self.name}: a rank holds at "
                "least 1 stage.",
                fix="Use stages_per_rank=1.",
            )
        if not self.weight_copies:
            copies = 2 if self.placement == "bidirectional" else 1
            object.__setattr__(self, "weight_copies", copies)

    @property
    def synchronous(self) -> bool:
        """Whether the pipeline drains at the optimizer step."""
        return self.updates is None

    def default_num_microbatches(self, pp: int) -> int:
        """The default M."""
        return self.num_microbatches or self.usual or 2 * pp

    def resolve(self, plan: Plan) -> Shape:
        """Fills a plan's defaults and checks its numbers against the schedule's rules.

        Raises:
            PlanError: A rule is broken; the message has the nearest value that works.
        """
        pp, num_microbatches, group = plan.pp, plan.num_microbatches, plan.group
        if pp < 1:
            raise PlanError(f"pp={pp} is not a number of ranks. Try pp=1.")
        if num_microbatches < 1:
            raise PlanError(
                f"num_microbatches={num_microbatches}: {self.name} needs at least 1 microbatch. "
                f"Try num_microbatches={2 * pp}."
            )
        stages = self.stages_per_rank if plan.stages_per_rank is None else plan.stages_per_rank
        if stages < 1:
            raise PlanError(
                f"schedule.stages_per_rank={stages}: a rank holds at least 1 stage. "
                f"Try schedule.stages_per_rank={self.stages_per_rank}."
            )
        if stages != self.stages_per_rank and not self.virtual_stages:
            raise PlanError(
                f"schedule.stages_per_rank={stages}: {self.name} runs {self.stages_per_rank} per "
                f"rank. Try schedule.stages_per_rank={self.stages_per_rank}, or "
                f"schedule=interleaved_1f1b schedule.stages_per_rank={stages}."
            )
        if plan.vertical_sync and self.name != "pipedream":
            raise PlanError(
                f"schedule.vertical_sync=true: {self.name} uses one version of the weights for a "
                "microbatch on all stages anyway.",
                fix="Remove schedule.vertical_sync, or try schedule=pipedream.",
            )
        if group is not None and not self.grouped:
            raise PlanError(
                f"schedule.group={group}: {self.name} has no groups of microbatches.",
                fix="Remove schedule.group, or try schedule=interleaved_1f1b.",
            )
        if group is None:
            group = _full_groups(pp, num_microbatches) if self.grouped else None
        elif group < min(pp, num_microbatches) or group > max(pp, num_microbatches):
            low, high = sorted((pp, num_microbatches))
            raise PlanError(
                f"schedule.group={group}: {self.name} needs pp <= group <= num_microbatches, here "
                f"{low} to {high}. Try schedule.group={min(max(group, low), high)}."
            )
        late = plan.vertical_sync, plan.accumulation
        shape = Shape(pp, num_microbatches, stages, group, None, *late)
        if self.rule is not None:
            self.rule(shape)
        return shape

    def place(self, shape: Shape) -> Placement:
        """Stages to ranks for this schedule.

        Raises:
            PlanError: The schedule's own placement is for another number of ranks.
        """
        if callable(self.placement):
            placed: object = self.placement(shape)
            if not isinstance(placed, Placement):
                raise PlanError(
                    f"schedule={self.name}: its placement function returned {placed!r}, not a "
                    "Placement.",
                    fix=(
                        "Return one, for example strategies.ir.program.loop(shape.pp, "
                        "shape.stages_per_rank)."
                    ),
                )
            if placed.num_ranks != shape.pp:
                raise PlanError(
                    f"schedule={self.name} places its stages on {placed.num_ranks} ranks, but "
                    f"pp={shape.pp}. Try pp={placed.num_ranks}."
                )
            return placed
        if self.placement == "loop":
            return loop(shape.pp, shape.stages_per_rank)
        if self.placement == "v":
            return v(shape.pp, shape.stages_per_rank)
        return bidirectional(shape.pp)


def _full_groups(pp: int, num_microbatches: int) -> int:
    """The least N >= P that leaves no last group smaller than P; P itself where M < P.

    >>> [_full_groups(4, microbatches) for microbatches in (3, 6, 8, 17)]
    [4, 6, 4, 6]
    """
    sizes = range(pp, num_microbatches + 1)
    return next((n for n in sizes if num_microbatches % n == 0 or num_microbatches % n >= pp), pp)


# ------------------------------------------------------------------------------------------ warmup
# The one frame that all 1F1B-like schedules share: warm up, alternate, drain.


def one_forward_one_backward(
    forwards: list[Instruction], backwards: list[Instruction], warmup: int
) -> tuple[Instruction, ...]:
    """``warmup`` forwards, then one forward and one backward in turn, then what is left.

    >>> from strategies.ir.instruction import forward, backward
    >>> forwards, backwards = ([make(0, m) for m in range(3)] for make in (forward, backward))
    >>> row = one_forward_one_backward(forwards, backwards, 1)
    >>> " ".join(map(str, row))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    warmup = min(warmup, len(forwards))
    row = forwards[:warmup]
    steady = len(forwards) - warmup
    for index in range(steady):
        row.append(forwards[warmup + index])
        row.append(backwards[index])
    return tuple(row + backwards[steady:])


def drop_padding(row: Iterable[Instruction], shape: Shape) -> tuple[Instruction, ...]:
    """What is left of a list that was made for more microbatches than there are.

    An instruction needs others of its own microbatch only, so leaving whole microbatches out of a
    program without deadlock leaves one without deadlock.
    """
    return tuple(
        item
        for item in row
        if item.microbatch is not None and item.microbatch < shape.num_microbatches
    )
