"""Equal costs for all stages, in any unit: what papers and exact formulas speak of."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.costs.table import CostTable, Transport
from strategies.errors import CostError
from strategies.ir.kinds import Kind
from strategies.ir.program import Program


@dataclass(frozen=True, slots=True)
class UniformCosts:
    """Costs per rank and microbatch, for all stages of the rank that one microbatch crosses.

    A virtual stage takes 1/V of them; with two weight copies a microbatch crosses one stage of a
    rank, which then costs the full figure.

    Attributes:
        forward: F > 0; the unit of time is whatever it is given in.
        backward: B = I + W.
        backward_input: I; None for B / 2.
        recompute: R; None for F.
        grad_reduce: One rank's whole gradient on its collective channel, split evenly over its
            stages and buckets. Where a program gathers weights, its reductions are reduce-scatters
            and take half of it, the gathers the other half.
        num_buckets: Buckets per stage, where the program is made for these costs.
        p2p: Latency of one message.
        transport: ``buffered`` or ``rendezvous``.
        fused: A fused F/B pair > 0; None for F + B.
        stage_input: What a checkpointed forward keeps, as a share of a full activation.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float | None = None
    recompute: float | None = None
    grad_reduce: float = 0.0
    num_buckets: int = 1
    p2p: float = 0.0
    transport: Transport = "buffered"
    fused: float | None = None
    stage_input: float = 0.0

    def __post_init__(self) -> None:
        if not self.forward > 0 or not self.backward > 0:
            raise CostError(
                f"costs.forward={self.forward:g} costs.backward={self.backward:g}: both must be "
                "> 0. Try costs.forward=1 costs.backward=2."
            )
        if self.backward_input is not None and not 0 < self.backward_input < self.backward:
            raise CostError(
                f"costs.backward_input={self.backward_input:g} is a share of "
                f"costs.backward={self.backward:g} and must lie between. "
                f"Try costs.backward_input={self.backward / 2:g}."
            )
        if self.fused is not None and not self.fused > 0:
            raise CostError(
                f"costs.fused={self.fused:g} is a duration > 0. "
                f"Try costs.fused={self.forward + self.backward:g}."
            )
        for name in ("recompute", "grad_reduce", "p2p"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise CostError(f"costs.{name} is a duration >= 0. Try costs.{name}=0.")
        if not 0 <= self.stage_input < 1:
            raise CostError(
                f"costs.stage_input={self.stage_input:g} is a share of a full activation, at least "
                "0 and below 1. Try costs.stage_input=0.1."
            )
        if self.num_buckets < 1:
            raise CostError(
                f"costs.num_buckets={self.num_buckets}: at least 1. Try costs.num_buckets=1."
            )
        if self.transport not in ("buffered", "rendezvous"):
            raise CostError(
                f"costs.transport={self.transport} is unknown. Try costs.transport=buffered or "
                "costs.transport=rendezvous."
            )

    def table(self, program: Program) -> CostTable:
        placement = program.placement
        share = 1.0 / placement.stages_per_microbatch
        count = placement.num_stages

        def spread(value: float) -> tuple[float, ...]:
            return (value * share,) * count

        half = self.backward / 2 if self.backward_input is None else self.backward_input
        buckets = count_buckets(program)
        reduce_share = self.grad_reduce * share / placement.weight_copies
        gathered = gathered_stages(program)
        halves = tuple(reduce_share / (2 if stage in gathered else 1) for stage in range(count))
        return CostTable(
            name="uniform",
            time_unit="F",
            forward=spread(self.forward),
            backward=spread(self.backward),
            backward_input=spread(half),
            backward_weight=spread(self.backward - half),
            recompute=spread(self.forward if self.recompute is None else self.recompute),
            step=(0.0,) * count,
            reduce=tuple((h / max(n, 1),) * n for h, n in zip(halves, buckets, strict=True)),
            gather=tuple(reduce_share / 2 if s in gathered else 0.0 for s in range(count)),
            latency=(self.p2p,) * len(program.boundaries),
            occupancy=(0.0,) * len(program.boundaries),
            transport=self.transport,
            fused=1.0 if self.fused is None else self.fused / (self.forward + self.backward),
            stage_input=(self.stage_input,) * count,
        )


def count_buckets(program: Program) -> tuple[int, ...]:
    counts = [0] * program.placement.num_stages
    for row in program.ranks:
        for item in row:
            if item.kind is Kind.REDUCE:
                assert item.bucket is not None
                counts[item.stage] = max(counts[item.stage], item.bucket + 1)
    return tuple(counts)


def gathered_stages(program: Program) -> frozenset[int]:
    """The stages whose weights are sharded: their reductions are reduce-scatters."""
    return frozenset(
        item.stage for row in program.ranks for item in row if item.kind is Kind.GATHER
    )
