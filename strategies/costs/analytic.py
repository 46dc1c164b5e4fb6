"""Costs from a model's FLOPs and bytes and a machine's figures: no measurement behind them.

Compute: FLOPs over reached peak, or bytes over memory bandwidth where that takes longer; a backward
is twice a forward, half of it for the inputs. Messages: bytes over the link's bandwidth, and its
latency. Reductions: a ring over the replicas, 2 (n-1)/n of the bytes and 2 (n-1) latencies; half of
that for a reduce-scatter, and for the all-gather that goes with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.costs.element_sizes import ElementSizes
from strategies.costs.hardware import Hardware
from strategies.costs.table import CostTable, Transport
from strategies.costs.uniform import count_buckets, gathered_stages
from strategies.errors import CostError
from strategies.ir.program import Program


@dataclass(frozen=True, slots=True)
class Load:
    """What one unit, or one stage, takes per microbatch.

    Attributes:
        forward_flops: Of one forward.
        parameters: Number of parameters.
        output_elements: Elements that go to the next stage.
        saved_elements: Elements kept from forward to backward.
    """

    forward_flops: float
    parameters: int
    output_elements: int
    saved_elements: int


def sum_loads(loads: list[Load]) -> Load:
    """A stage from its units; what it hands on is what its last unit hands on."""
    return Load(
        sum(load.forward_flops for load in loads),
        sum(load.parameters for load in loads),
        loads[-1].output_elements if loads else 0,
        sum(load.saved_elements for load in loads),
    )


@dataclass(frozen=True, slots=True)
class AnalyticCosts:
    """A model cut into stages, on a machine.

    Attributes:
        stages: One load per stage.
        hardware: The machine.
        dp: Replicas.
        element_bytes: Bytes of a weight, a gradient and an activation element.
        sizes: Each of them by itself, for mixed precision; None for ``element_bytes``.
        optimizer_elements: Elements of optimizer state per parameter (2 for Adam).
        transport: ``buffered`` or ``rendezvous``.
    """

    stages: tuple[Load, ...]
    hardware: Hardware
    dp: int = 1
    element_bytes: int = 4
    optimizer_elements: int = 2
    transport: Transport = "buffered"
    sizes: ElementSizes | None = None

    def table(self, program: Program) -> CostTable:
        """Durations in seconds.

        Raises:
            CostError: The loads are for another number of stages.
        """
        if len(self.stages) != program.placement.num_stages:
            raise CostError(
                f"costs of {len(self.stages)} stages for a program of "
                f"{program.placement.num_stages}."
            )
        forward = tuple(self._forward(load) for load in self.stages)
        links = [self._link(program, b.source, b.target) for b in program.boundaries]
        sent = [self.stages[b.source].output_elements for b in program.boundaries]
        gathered = gathered_stages(program)
        return CostTable(
            name="analytic",
            time_unit="s",
            forward=forward,
            backward=tuple(2 * value for value in forward),
            backward_input=forward,
            backward_weight=forward,
            recompute=forward,
            step=tuple(
                self._step(program, stage, sharded=stage in gathered)
                for stage in range(len(self.stages))
            ),
            reduce=tuple(
                (
                    self._once_round(program, stage, count, self._sizes.wire)
                    * (1 if stage in gathered else 2),
                )
                * count
                for stage, count in enumerate(count_buckets(program))
            ),
            gather=tuple(
                self._once_round(program, stage, 1, self._sizes.weight) if stage in gathered else 0
                for stage in range(len(self.stages))
            ),
            latency=tuple(latency for _, latency in links),
            occupancy=tuple(
                count * self._sizes.activation / bandwidth
                for count, (bandwidth, _) in zip(sent, links, strict=True)
            ),
            transport=self.transport,
            activation_bytes=tuple(
                load.saved_elements * self._sizes.activation for load in self.stages
            ),
            state_bytes=tuple(
                self._state_bytes(program, stage, sharded=stage in gathered)
                for stage in range(len(self.stages))
            ),
        )

    def _state_bytes(self, program: Program, stage: int, *, sharded: bool) -> int:
        """Weights, gradients and optimizer state, which alone is spread over the replicas."""
        shares = len(self._members(program, stage)) if sharded else 1
        sizes, count = self._sizes, self.stages[stage].parameters
        spread = count * (sizes.main + sizes.moment * self.optimizer_elements)
        return count * (sizes.weight + sizes.gradient) + -(-spread // shares)

    def _step(self, program: Program, stage: int, *, sharded: bool) -> float:
        """The optimizer reads gradient, weight and two moments and writes all but the first."""
        shares = len(self._members(program, stage)) if sharded else 1
        sizes = self._sizes
        touched = sizes.gradient + 2 * (sizes.main or sizes.weight) + 4 * sizes.moment
        touched += sizes.weight if sizes.main else 0
        moved = self.stages[stage].parameters * touched / shares
        return moved / self.hardware.memory_bandwidth

    @property
    def _sizes(self) -> ElementSizes:
        return ElementSizes.all(self.element_bytes) if self.sizes is None else self.sizes

    def _forward(self, load: Load) -> float:
        machine = self.hardware
        computed = load.forward_flops / (machine.peak_flops * machine.efficiency)
        moved = 2 * load.output_elements * self._sizes.activation / machine.memory_bandwidth
        return max(computed, moved)

    def _link(self, program: Program, source: int, target: int) -> tuple[float, float]:
        placement = program.placement
        first = placement.rank_of(source, 0) * self.dp
        second = placement.rank_of(target, 0) * self.dp
        return self.hardware.link(first, second)

    def _once_round(self, program: Program, stage: int, parts: int, size: int) -> float:
        """A ring's reduce-scatter, or all-gather, of 1/parts of a stage's elements of a size."""
        members = self._members(program, stage)
        ring = len(members)
        if not parts or ring < 2:
            return 0.0
        pairs = zip(members, members[1:] + members[:1], strict=True)
        links = [self.hardware.link(first, second) for first, second in pairs]
        bandwidth = min(link[0] for link in links)
        latency = max(link[1] for link in links)
        share = self.stages[stage].parameters * size / parts
        return (ring - 1) / ring * share / bandwidth + (ring - 1) * latency

    def _members(self, program: Program, stage: int) -> list[int]:
        owners = program.placement.owners(stage)
        return [owner * self.dp + replica for owner in owners for replica in range(self.dp)]
