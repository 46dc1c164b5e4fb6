"""A model and a machine, as far as a search asks about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from itertools import accumulate, pairwise
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from strategies.costs.analytic import AnalyticCosts, Known
from strategies.costs.capacity import Capacity, capacity
from strategies.costs.hardware import ElementSizes, Hardware, NumberFormat
from strategies.costs.load import Load, sum_loads
from strategies.costs.pass_seconds import by_kernels
from strategies.costs.profile_costs import ProfiledCosts
from strategies.costs.profile_file import Profile, Seconds, SizeProfile
from strategies.costs.table import CostTable, Transport
from strategies.ir.program import Placement, Program, chain, loop
from strategies.plan import NO_RECOMPUTE, Overlap, Recompute, num_buckets
from strategies.planner.cut import Tensor, handed_on

P = ParamSpec("P")
T = TypeVar("T")

# tp, sequences of a microbatch, whether layers recompute selectively -> one load per unit, on one
# rank.
Loads = Callable[[int, int, bool], tuple[Load, ...]]


@dataclass(frozen=True, slots=True)
class Machine:
    """What ranks are and how numbers are kept.

    Attributes:
        sizes: Bytes of an element of each kind.
        optimizer_elements: Of optimizer state per parameter.
        bucket_mb: Size of a reduction bucket.
        sequence_parallel: Whether activations are cut between tensor-parallel ranks.
        transport: Whether sends wait for their receives.
        waits_at_flush: Whether the step ends with a barrier: the makespan counts then, else the
            period.
        keeps_updates: Whether ranks keep what an update changes.
        number_format: What matrix products are computed in.
    """

    hardware: Hardware
    sizes: ElementSizes = field(default_factory=ElementSizes)
    optimizer_elements: int = 2
    bucket_mb: float = 25.0
    sequence_parallel: bool = False
    transport: Transport = "buffered"
    waits_at_flush: bool = False
    keeps_updates: bool = False
    number_format: NumberFormat = "fp32"


def memo(
    function: Callable[Concatenate[Problem, P], T],
) -> Callable[Concatenate[Problem, P], T]:
    """Computes once for each problem and arguments; what it returns lives as long as the problem.

    Arguments are hashed, so it counts how they are passed: by place or by name.
    """

    @wraps(function)
    def call(problem: Problem, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (call, args, *kwargs.items())
        found: T = problem.store.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            found = problem.store[key] = function(problem, *args, **kwargs)
        return found

    return call


_UNKNOWN: Any = object()


class _Units(NamedTuple):
    """The units of a model on one rank; equal ones are one object.

    Attributes:
        kinds: Different units, as if each handed on nothing.
        kind_of: Of each unit, its place in ``kinds``.
    """

    loads: tuple[Load, ...]
    kinds: tuple[Load, ...]
    kind_of: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """What is planned for, with the figures that many candidates share.

    Attributes:
        refuse_tp: Why the model cannot be cut into so many tensor-parallel ranks; None if it can.
        graph: What goes from unit to unit, in elements, for so many sequences; None for a chain.
        measured: What units take on the machine, where it was measured; else it is computed.
        num_experts: Of each layer that has some; 0 where none has.
        imbalance: What the fullest of the ranks that share experts has to compute, over the mean.
        expert_tp: Whether ranks that share matrices share those of each expert, too.
        spreads_cut: Whether experts are known to be spread where matrices are cut, too.
    """

    machine: Machine
    loads: Loads
    num_units: int
    refuse_tp: Callable[[int], str | None] = lambda tp: None
    graph: Callable[[int], tuple[Tensor, ...]] | None = None
    measured: Measured | None = None
    num_experts: int = 0
    imbalance: float = 1.0
    expert_tp: bool = False
    spreads_cut: bool = True
    store: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    known: Known = field(default_factory=Known, init=False, repr=False, compare=False)

    def room(self, layout: Layout) -> int:
        """The most bytes of tensors that fit into the memory of a rank."""
        return self.capacity(layout).room

    def capacity(self, layout: Layout) -> Capacity:
        hardware, tp = self.machine.hardware, layout.tp
        return capacity(hardware, tp=tp, pp=layout.pp, dp=layout.dp, ep=layout.ep)

    @property
    def least_size(self) -> int:
        """The smallest microbatch whose costs are known."""
        return 1 if self.measured is None else self.measured.sizes[0]

    def units(self, layout: Layout, *, selective: bool = False) -> tuple[Load, ...]:
        return self._units(layout.tp, layout.microbatch_size, selective).loads

    @memo
    def _units(self, tp: int, size: int, selective: bool) -> _Units:
        made = self.loads(tp, size, selective)
        once = {id(load): self._same(load) for load in made}  # equal layers are mostly one object
        kinds = {at: self._same(replace(load, output_elements=0)) for at, load in once.items()}
        places = {id(kind): place for place, kind in enumerate(kinds.values())}
        return _Units(
            tuple(once[id(load)] for load in made),
            tuple(kinds.values()),
            tuple(places[id(kinds[id(load)])] for load in made),
        )

    @memo
    def _same(self, load: Load) -> Load:
        """One object for all that are equal, which costs look for."""
        return load

    def costs(
        self, layout: Layout, units_per_stage: tuple[int, ...], *, selective: bool = False
    ) -> PlannedCosts:
        """The costs of a cut, as a run with this layout has them."""
        ends = list(accumulate(units_per_stage, initial=0))
        stages = [range(*span) for span in pairwise(ends)]
        if self.graph is None:
            return self._cut(layout, stages, selective=selective)
        key = (layout.tp, layout.microbatch_size, selective)
        loads = [self._stage_load(*key, stage.start, stage.stop, True) for stage in stages]
        handed = handed_on(self.graph(layout.microbatch_size), units_per_stage)
        return replace(self._costs(layout, handing(loads, handed)), handed=handed)

    def buckets(self, costs: PlannedCosts, placement: Placement) -> tuple[int, ...]:
        """Per stage, how many its gradients are reduced in."""
        assumed = costs if isinstance(costs, AnalyticCosts) else costs.assumed
        reduces = assumed.dp > 1 or placement.weight_copies > 1
        among = assumed.tp > assumed.ep and not self.expert_tp
        reduces = reduces or (self.num_experts > 0 and self.spreads_cut and among)
        wire, much = self.machine.sizes.wire, self.machine.bucket_mb
        alike = {id(load): load for load in assumed.stages} if reduces else {}
        number = {at: num_buckets(assumed.held(load) * wire, much) for at, load in alike.items()}
        return tuple(number.get(id(load), 0) for load in assumed.stages)

    def unit_table(self, layout: Layout, *, selective: bool = False) -> CostTable:
        """Each unit as a stage of its own: what a cut goes by."""
        return self._unit_table(layout.of_units, selective)

    @memo
    def _unit_table(self, layout: Layout, selective: bool) -> CostTable:
        alone = [range(unit, unit + 1) for unit in range(self.num_units)]
        costs = self._cut(layout, alone, selective=selective, fixed=False)
        alike, none = draft(loop(1, self.num_units)), (0,) * self.num_units
        return costs.table_for(alike, none, frozenset(), breakdown=False)

    def whole_compute(self, layout: Layout, *, selective: bool = False) -> CostTable:
        """What the whole model computes as one stage, without what it sends, reduces and holds."""
        return self._whole_compute(layout.of_units, selective)

    @memo
    def _whole_compute(self, layout: Layout, selective: bool) -> CostTable:
        costs = self._cut(layout, [range(self.num_units)], selective=selective, sends=False)
        if isinstance(costs, AnalyticCosts):
            return costs.compute_only()
        return costs.table_for(draft(loop(1, 1)), (0,), frozenset(), breakdown=False)

    def whole_table(
        self, layout: Layout, *, zero1: bool = False, selective: bool = False
    ) -> CostTable:
        """The whole model as one stage that sends nothing."""
        zero1 = zero1 and layout.dp > 1
        return self._whole_table(replace(layout.of_units, dp=layout.dp), zero1, selective)

    @memo
    def _whole_table(self, layout: Layout, zero1: bool, selective: bool) -> CostTable:
        costs = self._cut(layout, [range(self.num_units)], selective=selective, sends=False)
        shared = frozenset({0}) if zero1 else frozenset()
        return costs.table_for(draft(loop(1, 1)), (0,), shared, breakdown=False)

    def _cut(
        self,
        layout: Layout,
        stages: Sequence[range],
        *,
        selective: bool,
        fixed: bool = True,
        sends: bool = True,
    ) -> PlannedCosts:
        """``fixed`` as in ``Measured.costs``; ``sends`` is off for the whole model."""
        key = (layout.tp, layout.microbatch_size, selective)
        loads = [self._stage_load(*key, stage.start, stage.stop, sends) for stage in stages]
        assumed = self._costs(layout, tuple(loads))
        if self.measured is None:
            return assumed
        return self.measured.costs(assumed, stages, layout.microbatch_size, fixed=fixed)

    @memo
    def _stage_load(
        self, tp: int, size: int, selective: bool, start: int, stop: int, sends: bool
    ) -> Load:
        """The sum of a stage's units: one object for equal sums."""
        units = self._units(tp, size, selective)
        handed = units.loads[stop - 1].output_elements if sends and stop > start else 0
        return self._handing(tp, size, selective, units.kind_of[start:stop], handed)

    @memo
    def _handing(
        self, tp: int, size: int, selective: bool, kinds: tuple[int, ...], handed: int
    ) -> Load:
        """A stage that hands on so many elements; costs know where that takes no time in it."""
        bare = self._sum(tp, size, selective, kinds)
        load = replace(bare, output_elements=handed)
        if by_kernels(self.machine.hardware, bare):
            self.known.alike[id(load)] = load, bare
        return load

    @memo
    def _sum(self, tp: int, size: int, selective: bool, kinds: tuple[int, ...]) -> Load:
        known = self._units(tp, size, selective).kinds
        return self._same(sum_loads([known[kind] for kind in kinds]))

    def _costs(self, layout: Layout, stages: tuple[Load, ...]) -> AnalyticCosts:
        machine = self.machine
        return AnalyticCosts(
            stages,
            machine.hardware,
            dp=layout.dp,
            sizes=machine.sizes,
            optimizer_elements=machine.optimizer_elements,
            transport=machine.transport,
            tp=layout.tp,
            sequence_parallel=machine.sequence_parallel,
            keeps_updates=machine.keeps_updates,
            number_format=machine.number_format,
            ep=layout.ep,
            expert_tp=self.expert_tp,
            imbalance=self.imbalance,
            known=self.known,
        )


def handing(stages: list[Load], handed: tuple[tuple[int, int, int], ...]) -> tuple[Load, ...]:
    """Stages with all that they hand on, to whichever others, as their output."""
    given = [0] * len(stages)
    for source, _, count in handed:
        given[source] += count
    last = len(stages) - 1
    return tuple(
        load if stage == last else replace(load, output_elements=given[stage])
        for stage, load in enumerate(stages)
    )


@lru_cache(maxsize=512)
def draft(placement: Placement) -> Program:
    """A program without lists, of which costs want to know placement and boundaries."""
    rows = ((),) * placement.num_ranks
    return Program("draft", placement, 1, rows, chain(placement.num_stages))


# ---------------------------------------------------------------------------------------- measured

PlannedCosts = AnalyticCosts | ProfiledCosts
"""What a candidate's cut takes, computed or measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured layers and links.

    Attributes:
        classes: Per unit of the model, its class: an index into ``profile.classes``.
        tp: Ranks that shared matrices when it was made; no other degree is known.
        selective: Whether layers recomputed parts of themselves.
    """

    profile: Profile
    classes: tuple[int, ...]
    tp: int
    selective: bool

    @property
    def sizes(self) -> range:
        """Microbatch sizes that it can tell: those between two that were measured."""
        numbers = [number for number, _ in self.profile.sizes]
        return range(min(numbers), max(numbers) + 1)

    @property
    def error(self) -> float | None:
        """The largest of its microbatch sizes; None where none is known."""
        return max(self.profile.errors, default=None)

    def costs(
        self,
        assumed: AnalyticCosts,
        stages: Sequence[range],
        microbatch_size: int,
        *,
        fixed: bool = True,
    ) -> ProfiledCosts:
        """The costs of a cut; ``assumed`` are computed ones of it, for what was not measured.

        Without ``fixed`` stages take nothing by themselves: for comparing units.
        """
        classes = tuple(tuple(self.classes[unit] for unit in stage) for stage in stages)
        profile = self.profile if fixed else _units_alone(self.profile)
        return ProfiledCosts(profile, classes, microbatch_size, assumed)


def _units_alone(profile: Profile) -> Profile:
    sizes = tuple(
        (number, SizeProfile(Seconds(), figures.units, figures.error))
        for number, figures in profile.sizes
    )
    return replace(profile, sizes=sizes, rest_s=0.0)


# ------------------------------------------------------------------------------------------ layout


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks and batches.

    Attributes:
        tp: Ranks that share the matrices of a stage.
        dp: Replicas.
        microbatch_size: Sequences.
        num_microbatches: M per step and replica.
        ep: Ranks that the experts of a stage are spread over.
    """

    tp: int
    pp: int
    dp: int
    microbatch_size: int
    num_microbatches: int
    ep: int = 1

    @property
    def of_units(self) -> Layout:
        """The same for the figures of units, which neither depth nor replicas change."""
        return Layout(self.tp, 1, 1, self.microbatch_size, 1, self.ep)


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule with everything that decides its instructions.

    Attributes:
        stages_per_rank: V.
        group: Microbatches per round; None for the schedule's default.
    """

    schedule: str
    stages_per_rank: int
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that may be simulated.

    Attributes:
        overlap: ``grad_reduce``, ``none`` or ``zero1``.
        units: Units of each stage.
        recompute: Which forwards keep only their input.
    """

    layout: Layout
    order: Order
    overlap: Overlap
    units: tuple[int, ...]
    recompute: Recompute = NO_RECOMPUTE
