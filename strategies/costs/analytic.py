"""Costs from a model's FLOPs and bytes and a machine's figures: no measurement behind them.

Compute: FLOPs over reached peak, or bytes over memory bandwidth where that takes longer; a backward
is twice a forward, half of it for the inputs. Messages: bytes over the link's bandwidth, and its
latency. Reductions: a ring over the replicas, 2 (n-1)/n of the bytes and 2 (n-1) latencies.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.costs.hardware import Hardware
from strategies.costs.table import CostTable, Transport
from strategies.costs.uniform import count_buckets
from strategies.errors import CostError
from strategies.ir.program import Program

# Reads of weight, gradient and two moments, writes of weight and moments.
_STEP_TOUCHES = 7


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
        optimizer_elements: Elements of optimizer state per parameter (2 for Adam).
        transport: ``buffered`` or ``rendezvous``.
    """

    stages: tuple[Load, ...]
    hardware: Hardware
    dp: int = 1
    element_bytes: int = 4
    optimizer_elements: int = 2
    transport: Transport = "buffered"

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
        machine = self.hardware
        forward = tuple(self._forward(load) for load in self.stages)
        links = [self._link(program, b.source, b.target) for b in program.boundaries]
        sent = [self.stages[b.source].output_elements for b in program.boundaries]
        return CostTable(
            name="analytic",
            time_unit="s",
            forward=forward,
            backward=tuple(2 * value for value in forward),
            backward_input=forward,
            backward_weight=forward,
            recompute=forward,
            step=tuple(
                _STEP_TOUCHES * load.parameters * self.element_bytes / machine.memory_bandwidth
                for load in self.stages
            ),
            reduce=tuple(
                self._reduce(program, stage, count)
                for stage, count in enumerate(count_buckets(program))
            ),
            latency=tuple(latency for _, latency in links),
            occupancy=tuple(
                count * self.element_bytes / bandwidth
                for count, (bandwidth, _) in zip(sent, links, strict=True)
            ),
            transport=self.transport,
            activation_bytes=tuple(
                load.saved_elements * self.element_bytes for load in self.stages
            ),
            state_bytes=tuple(
                load.parameters * self.element_bytes * (2 + self.optimizer_elements)
                for load in self.stages
            ),
        )

    def _forward(self, load: Load) -> float:
        machine = self.hardware
        computed = load.forward_flops / (machine.peak_flops * machine.efficiency)
        moved = 2 * load.output_elements * self.element_bytes / machine.memory_bandwidth
        return max(computed, moved)

    def _link(self, program: Program, source: int, target: int) -> tuple[float, float]:
        placement = program.placement
        first = placement.rank_of(source, 0) * self.dp
        second = placement.rank_of(target, 0) * self.dp
        return self.hardware.link(first, second)

    def _reduce(self, program: Program, stage: int, count: int) -> tuple[float, ...]:
        owners = program.placement.owners(stage)
        members = [owner * self.dp + replica for owner in owners for replica in range(self.dp)]
        ring = len(members)
        if not count or ring < 2:
            return (0.0,) * count
        pairs = zip(members, members[1:] + members[:1], strict=True)
        links = [self.hardware.link(first, second) for first, second in pairs]
        bandwidth = min(link[0] for link in links)
        latency = max(link[1] for link in links)
        share = self.stages[stage].parameters * self.element_bytes / count
        once = 2 * (ring - 1) / ring * share / bandwidth + 2 * (ring - 1) * latency
        return (once,) * count
