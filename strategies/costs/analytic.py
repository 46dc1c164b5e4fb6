"""Costs from a model's FLOPs and bytes and a machine's figures: no measurement behind them.

Compute, and what ranks of one stage exchange in it: ``pass_seconds``. Messages: bytes over the
link's bandwidth, and its latency. Reductions: rings and trees over the replicas (``rings``); half
of an all-reduce for a reduce-scatter, and for the all-gather that goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from operator import add, mul, sub
from typing import NamedTuple, TypeVar

from strategies.costs.hardware import (
    ElementSizes,
    Group,
    Hardware,
    NumberFormat,
    expert_holders,
    reduce_scatter_seconds,
    replicas,
)
from strategies.costs.kernels import memory_bound, product_seconds
from strategies.costs.load import Load
from strategies.costs.pass_seconds import StageTimes
from strategies.costs.table import CostTable, StageMemory, Transport
from strategies.costs.uniform import reduced_and_gathered
from strategies.errors import CostError
from strategies.ir.program import Program
from strategies.ir.versions import weight_versions

_Figure = TypeVar("_Figure")


class _UpdateCost(NamedTuple):
    """What a stage's update takes: seconds of a STEP, a bucket, a GATHER, and bytes."""

    step: float
    reduce: float
    gather: float
    state_bytes: int
    widened_bytes: int


@dataclass(slots=True)
class Known:
    """Figures of stages that costs share which differ in cuts and degrees only.

    Keyed by ``id(load)``; the load is stored with the value so that its id is not reused, and in
    ``alike`` with one that computes the same. ``of`` is all else that decides them: a copy with
    another machine starts with an empty cache.
    """

    of: tuple[object, ...] = ()
    durations: dict[tuple[int, int, int], tuple[Load, tuple[float, ...]]] = field(
        default_factory=dict
    )
    alike: dict[int, tuple[Load, Load]] = field(default_factory=dict)
    takes: dict[object, _UpdateCost] = field(default_factory=dict)
    holders: dict[tuple[tuple[int, ...], int, int, int], tuple[Group, Group]] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class AnalyticCosts:
    """A model cut into stages, on a machine.

    Attributes:
        stages: One load per stage, of one rank.
        element_bytes: Bytes of a weight, a gradient and an activation element.
        sizes: Each of them by itself, for mixed precision; None for ``element_bytes``.
        optimizer_elements: Elements of optimizer state per parameter (2 for Adam).
        transport: ``buffered`` or ``rendezvous``.
        tp: Ranks that share the matrices of a stage.
        sequence_parallel: Whether boundary tensors are cut between those ranks anyway.
        handed: (source, target, elements) of what stages hand to which others; () where each hands
            its ``output_elements`` to the next.
        one_link: Messages and reductions leave a rank through one interface, which they share;
            else nothing slows them but others of their kind. Only for ``buffered``.
        number_format: Of matrix products; the machine's peak is that of it.
        ep: Ranks that the experts of a stage are spread over.
        expert_tp: Whether ranks that share matrices share those of each expert, too.
        imbalance: What the fullest of them has to compute, over the mean; counts for ep > 1.
        keeps_updates: Whether what an update changes is kept, to undo it.
        known: Shared by costs that differ in cuts and degrees only.
    """

    stages: tuple[Load, ...]
    hardware: Hardware
    dp: int = 1
    element_bytes: int = 4
    optimizer_elements: int = 2
    transport: Transport = "buffered"
    sizes: ElementSizes | None = None
    tp: int = 1
    sequence_parallel: bool = False
    one_link: bool = False
    handed: tuple[tuple[int, int, int], ...] = ()
    keeps_updates: bool = False
    number_format: NumberFormat = "fp32"
    ep: int = 1
    imbalance: float = 1.0
    expert_tp: bool = False
    known: Known = field(default_factory=Known, repr=False, compare=False)

    def __post_init__(self) -> None:
        of = (
            self.hardware, self.sizes, self.element_bytes, self.optimizer_elements,
            self.sequence_parallel, self.keeps_updates, self.number_format, self.imbalance,
            self.expert_tp,
        )  # fmt: skip
        if not self.known.of:
            self.known.of = of
        elif self.known.of != of:
            object.__setattr__(self, "known", Known(of))
        if self.one_link and self.transport != "buffered":
            raise CostError(
                f"one link for messages and reductions with costs.transport={self.transport}: only "
                "buffered messages share it. Try costs.transport=buffered."
            )

    def table(self, program: Program) -> CostTable:
        """Durations in seconds."""
        return self.table_for(program, *reduced_and_gathered(program, len(self.stages)))

    def table_for(
        self,
        program: Program,
        buckets: Sequence[int],
        gathered: frozenset[int],
        *,
        breakdown: bool = True,
    ) -> CostTable:
        """The table of a program that has no reductions yet: a search does not make them.

        ``buckets`` it will have per stage, and the weights of ``gathered`` stages will be gathered;
        with ``breakdown`` the table tells what stages hold by what it is for.
        """
        forward, backward, inputs, weights = self._durations()
        links, passes = self._links(program), self.passes
        sent, sizes = self._sent(program), self._sizes
        takes = self._per_stage(program, buckets, gathered)
        gathers = {count: passes.gather(count) for count in {*sent}}
        saved = self._alike(lambda load: self._saved(load) * sizes.activation)
        received = self._stage_inputs(program, sent)
        return CostTable(
            name="analytic",
            time_unit="s",
            forward=forward,
            backward=backward,
            backward_input=inputs,
            backward_weight=weights,
            recompute=forward,
            step=self._steps(program, takes),
            reduce=tuple(
                (each.reduce,) * number for each, number in zip(takes, buckets, strict=True)
            ),
            gather=tuple(each.gather for each in takes),
            latency=tuple(
                latency + gathers[n] for n, (_, latency) in zip(sent, links, strict=True)
            ),
            occupancy=tuple(
                n * sizes.activation / self.tp / bandwidth
                for n, (bandwidth, _) in zip(sent, links, strict=True)
            ),
            transport=self.transport,
            one_link=self.one_link,
            exchange=passes.exchanges(self.stages),
            activation_bytes=saved,
            stage_input=received,
            state_bytes=tuple(each.state_bytes for each in takes),
            memory=self._memory(takes, saved, received) if breakdown else None,
        )

    def compute_only(self) -> CostTable:
        """What stages compute, and nothing that they send, add up, update or hold."""
        forward, backward, inputs, weights = self._durations()
        none = (0.0,) * len(forward)
        return CostTable(
            name="analytic",
            time_unit="s",
            forward=forward,
            backward=backward,
            backward_input=inputs,
            backward_weight=weights,
            recompute=forward,
            step=none,
            reduce=(),
            latency=none[1:],
            occupancy=none[1:],
        )

    def with_sharded_optimizer(
        self, table: CostTable, program: Program, buckets: Sequence[int], gathered: frozenset[int]
    ) -> CostTable:
        """A table of ``table_for``, with the weights of these stages gathered in place of its."""
        takes = self._per_stage(program, buckets, gathered)
        memory = table.memory
        if memory is not None:
            memory = replace(
                memory,
                optimizer=_beyond(takes, memory.parameters, memory.gradients),
                step_temporaries=tuple(each.widened_bytes for each in takes),
            )
        return replace(
            table,
            step=self._steps(program, takes),
            reduce=tuple(
                (each.reduce,) * number for each, number in zip(takes, buckets, strict=True)
            ),
            gather=tuple(each.gather for each in takes),
            state_bytes=tuple(each.state_bytes for each in takes),
            memory=memory,
        )

    def _steps(self, program: Program, takes: Sequence[_UpdateCost]) -> tuple[float, ...]:
        steps = tuple(each.step for each in takes)
        if not any(copied := self.copied_bytes(program)):
            return steps
        return tuple(map(add, steps, (memory_bound(self.hardware, much) for much in copied)))

    def _alike(self, figure: Callable[[Load], _Figure]) -> tuple[_Figure, ...]:
        """A figure of each stage; of stages that are one object it is made once."""
        places = list(map(id, self.stages))
        once = {
            at: figure(load) for at, load in dict(zip(places, self.stages, strict=True)).items()
        }
        return tuple(map(once.__getitem__, places))

    def _per_stage(
        self, program: Program, buckets: Sequence[int], gathered: frozenset[int]
    ) -> list[_UpdateCost]:
        """Of stages with as many parameters, on owners that lie alike, one is looked at."""
        owners_of, known, found = program.placement.owners, self.known.takes, []
        same = (self.dp, self.tp, self.ep, program.feeds_back)
        here: dict[object, _UpdateCost] = {}
        # Owners that lie alike on their nodes: those after so many ranks begin a node again.
        node = self.hardware.gpus_per_node
        turn = node // gcd(self.dp * self.tp, node)
        with_sharded_optimizer = bool(self.hardware.step_overhead_s)  # among all stages of an owner
        for stage, (load, number) in enumerate(zip(self.stages, buckets, strict=True)):
            owners, sharded = owners_of(stage), stage in gathered
            first = 0 if with_sharded_optimizer else owners[0] // turn * turn
            lie = tuple(owner - first for owner in owners) if first else owners
            at = (id(load), lie, number, sharded)
            if at not in here:
                most = self._most_stages(program, owners)
                has = (load.parameters, load.experts, load.lean_parameters, load.update_products)
                place = (len(owners), self._holders(owners))
                key = (has, same, place, most, number, sharded)
                if key not in known:
                    known[key] = self._takes(program, stage, number, sharded=sharded)
                here[at] = known[key]
            found.append(here[at])
        return found

    def _takes(self, program: Program, stage: int, number: int, *, sharded: bool) -> _UpdateCost:
        sizes = self._sizes
        reduced = self._once_round(program, stage, number, sizes.wire)
        return _UpdateCost(
            self._step(program, stage, sharded=sharded),
            reduced if sharded else 2 * reduced,
            self._once_round(program, stage, 1, sizes.weight) if sharded else 0,
            self._state_bytes(program, stage, sharded=sharded),
            self._widened_bytes(program, stage, sharded=sharded),
        )

    def _holders(self, owners: tuple[int, ...]) -> tuple[Group, Group]:
        """The replicas of a stage on its owners, and those ranks that hold the same experts."""
        key = (owners, self.dp, self.tp, self._block)
        if key not in self.known.holders:
            self.known.holders[key] = (
                replicas(self.hardware, owners, self.dp, self.tp),
                expert_holders(self.hardware, *key),
            )
        return self.known.holders[key]

    def _most_stages(self, program: Program, owners: tuple[int, ...]) -> int:
        """Of an owner: among so many an optimizer's overhead is shared out."""
        if not self.hardware.step_overhead_s:
            return 0
        return max(len(program.placement.stages_of(owner)) for owner in owners)

    def _links(self, program: Program) -> list[tuple[float, float]]:
        """(bandwidth, latency) of each boundary."""
        hardware, width, first = self.hardware, self.dp * self.tp, program.placement.copies[0]
        more, per_node = hardware.message_overhead_s, hardware.gpus_per_node
        inside = (hardware.intra_bandwidth, hardware.intra_latency_s + more)
        between = (hardware.inter_bandwidth, hardware.inter_latency_s + more)
        node = [rank * width // per_node for rank in first]
        return [inside if node[b.source] == node[b.target] else between for b in program.boundaries]

    def _memory(
        self, takes: Sequence[_UpdateCost], saved: tuple[int, ...], received: tuple[float, ...]
    ) -> StageMemory:
        """What stages hold; temporaries are a stage's result and the gradients at its ends."""
        sizes = self._sizes
        element, cut = sizes.activation, self.tp if self.sequence_parallel else 1
        parameters = self._alike(lambda load: self.held(load) * sizes.weight)
        gradients = self._alike(lambda load: self.held(load) * sizes.gradient)
        made = self._alike(lambda load: load.output_elements * element // cut)
        # Gathered by one layer at a time: pieces and whole, in a backward its gradient, too.
        forward = self._alike(lambda load: 2 * self._gathered(load) * element)
        backward = self._alike(
            lambda load: (3 * self._gathered(load) + load.rebuilt_elements) * element
        )
        ends = list(map(add, made, (0, *made)))
        ends[-1:] = [size + made[-1] for size in ends[-1:]]  # the loss's own gradient, too
        return StageMemory(
            parameters=parameters,
            gradients=gradients,
            optimizer=_beyond(takes, parameters, gradients),
            activations=saved,
            waiting=tuple(
                kept if load.waiting_elements is None else load.waiting_elements * element
                for load, kept in zip(self.stages, saved, strict=True)
            ),
            inputs=tuple(map(int, map(mul, received, saved))),
            outputs=(*made[:-1], 0),
            forward_temporaries=tuple(map(add, made, forward)),
            backward_temporaries=tuple(map(add, ends, backward)),
            step_temporaries=tuple(each.widened_bytes for each in takes),
        )

    def _saved(self, load: Load) -> int:
        """Elements that the rank with most tokens keeps."""
        extra = self.imbalance - 1.0 if self.ep > 1 else 0.0
        return load.saved_elements + int(extra * load.expert_saved)

    def held(self, load: Load) -> int:
        """Parameters of a stage, or unit, that one rank has."""
        return load.parameters - load.experts + -(-load.experts // self._block)

    def _widened_bytes(self, program: Program, stage: int, *, sharded: bool) -> int:
        """Gradients that were summed in 16 bits, as the optimizer reads them in 32."""
        sizes, load = self._sizes, self.stages[stage]
        if sizes.main <= sizes.gradient:
            return 0
        shares, of_experts = self._sharers(program, stage) if sharded else (1, 1)
        experts = -(-load.experts // self._block)
        whole = -(-(load.parameters - load.experts) * sizes.main // shares)
        return whole + -(-experts * sizes.main // of_experts)

    def _gathered(self, load: Load) -> int:
        """Elements that a layer gathers along the sequence."""
        return max(load.backward_sums, default=0) if self.sequence_parallel else 0

    def _sent(self, program: Program) -> list[int]:
        """Elements that travel over each boundary."""
        if not self.handed:
            return [self.stages[b.source].output_elements for b in program.boundaries]
        known = {(source, target): count for source, target, count in self.handed}
        return [known.get((b.source, b.target), 0) for b in program.boundaries]

    def _stage_inputs(self, program: Program, sent: Sequence[int]) -> tuple[float, ...]:
        """What a stage receives over what it saves; token ids count for nothing."""
        received = [0.0] * len(self.stages)
        for boundary, count in zip(program.boundaries, sent, strict=True):
            received[boundary.target] += count
        cut = self.tp if self.sequence_parallel else 1
        return tuple(
            min(1.0, count / cut / load.saved_elements) if load.saved_elements else 0.0
            for count, load in zip(received, self.stages, strict=True)
        )

    def _state_bytes(self, program: Program, stage: int, *, sharded: bool) -> int:
        """Weights, gradients and optimizer state, which alone is spread over the replicas."""
        sizes, load = self._sizes, self.stages[stage]
        element = sizes.main + sizes.moment * self.optimizer_elements
        # What is kept to undo an update: state, and the weights that it changes.
        kept = (sizes.main or sizes.weight) + sizes.moment * self.optimizer_elements
        element += kept if self.keeps_updates else 0
        if program.feeds_back:
            # The one before; and what weights were, where no version of them is what is updated.
            element += (2 if sizes.main or sharded else 1) * (sizes.main or sizes.weight)
        shares, of_experts = self._sharers(program, stage) if sharded else (1, 1)
        experts = -(-load.experts // self._block)
        spread = (load.parameters - load.experts) * element
        spread -= load.lean_parameters * sizes.moment * (2 if self.keeps_updates else 1)
        held = self.held(load) * (sizes.weight + sizes.gradient)
        return held + -(-spread // shares) + -(-experts * element // of_experts)

    def _sharers(self, program: Program, stage: int) -> tuple[int, int]:
        """How many ranks hold a stage, and how many the same of its experts."""
        owners = len(program.placement.owners(stage))
        return owners * self.dp, max(1, owners * self.dp * self.tp // self._block)

    def _step(self, program: Program, stage: int, *, sharded: bool) -> float:
        """The optimizer reads gradient, weight and two moments and writes all but the first.

        What it computes of whole matrices, as Muon does, is in bfloat16.
        """
        load, sizes = self.stages[stage], self._sizes
        shares, of_experts = self._sharers(program, stage) if sharded else (1, 1)
        touched = sizes.gradient + 2 * (sizes.main or sizes.weight) + 4 * sizes.moment
        touched += sizes.weight if sizes.main else 0
        touched += 5 * (sizes.main or sizes.weight) if program.feeds_back else 0
        moved = (load.parameters - load.experts) * touched / shares
        moved += load.experts * touched / self._block / of_experts
        took = memory_bound(self.hardware, moved)
        for product, number in load.update_products:
            took += number * product_seconds(product, self.hardware, "bf16")
        if not self.hardware.step_overhead_s:
            return took
        most = self._most_stages(program, program.placement.owners(stage))
        return took + self.hardware.step_overhead_s / most

    def copied_bytes(self, program: Program) -> tuple[int, ...]:
        """Per stage, what is read and written right before an update that leaves weights in place.

        Without a flush, where microbatches under way still read them.
        """
        if program.updates is None:
            return (0,) * len(self.stages)
        versions, owners = weight_versions(program), program.placement.owners
        return tuple(
            2 * self.held(load) * self._sizes.weight if versions[owners(stage)[0]] > 1 else 0
            for stage, load in enumerate(self.stages)
        )

    @property
    def _sizes(self) -> ElementSizes:
        return ElementSizes.all(self.element_bytes) if self.sizes is None else self.sizes

    @property
    def passes(self) -> StageTimes:
        """What a stage computes, and what its ranks exchange meanwhile."""
        return StageTimes(
            self.hardware, self._sizes, self.number_format, self.tp, self.sequence_parallel,
            self.ep, self.expert_tp, self.imbalance,
        )  # fmt: skip

    def _durations(self) -> tuple[tuple[float, ...], ...]:
        """Per stage of F, B, I and W; stages that are one object are looked at once."""
        known, passes = self.known.durations, self.passes

        def seconds(load: Load) -> tuple[float, ...]:
            _, load = self.known.alike.get(id(load), (load, load))
            key = (id(load), self.tp, self.ep)
            if key not in known:
                known[key] = load, passes.of(load)
            return known[key][1]

        return tuple(zip(*self._alike(seconds), strict=True)) if self.stages else ((), (), (), ())

    @property
    def _block(self) -> int:
        """Ranks that hold all experts of a stage together."""
        return self.ep * (self.tp if self.expert_tp else 1)

    def _once_round(self, program: Program, stage: int, parts: int, size: int) -> float:
        """A reduce-scatter, or all-gather, of 1/parts of a stage's elements of a size."""
        if not parts:
            return 0.0
        load = self.stages[stage]
        group, same = self._holders(program.placement.owners(stage))
        spread = load.experts if self.ep > 1 or self.tp > 1 else 0
        took = reduce_scatter_seconds(
            self.hardware, group, (load.parameters - spread) * size / parts
        )
        if spread:
            took += reduce_scatter_seconds(self.hardware, same, spread / self._block * size / parts)
        return took


def _beyond(
    takes: Sequence[_UpdateCost], parameters: Sequence[int], gradients: Sequence[int]
) -> tuple[int, ...]:
    """What the optimizer holds of each stage's state."""
    held = map(add, parameters, gradients)
    return tuple(map(sub, (each.state_bytes for each in takes), held))
