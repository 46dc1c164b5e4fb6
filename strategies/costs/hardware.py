"""The machine that analytic costs assume: peaks, links, and how much of the peak is reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """Figures of one kind of rank and its links.

    Attributes:
        name: Label in reports.
        peak_flops: FLOP/s of one rank.
        efficiency: Share of the peak that kernels reach, 0 to 1.
        memory_gb: Memory of one rank, in 1e9 bytes.
        memory_bandwidth: Bytes/s.
        intra_bandwidth: Bytes/s per direction between ranks of a node.
        intra_latency_s: Seconds.
        inter_bandwidth: Bytes/s per direction between nodes.
        inter_latency_s: Seconds.
        gpus_per_node: Ranks of a node.
        unit_overhead_s: What a unit's forward, and each half of its backward, takes beside its
            FLOPs.
        stage_overhead_s: The same for a stage, whatever lies in it.
        step_overhead_s: What an optimizer step takes on a rank beside its weights.
        ring_bandwidth: Bytes/s of a collective in a node; None for that of messages.
        ring_latency_s: Of each of its steps; None likewise.
        lockstep_loss: Share of their compute that ranks lose which share matrices: after each
            product they wait for the slower one.
    """

    name: str
    peak_flops: float
    efficiency: float
    memory_gb: float
    memory_bandwidth: float
    intra_bandwidth: float
    intra_latency_s: float
    inter_bandwidth: float
    inter_latency_s: float
    gpus_per_node: int
    unit_overhead_s: float = 0.0
    stage_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    ring_bandwidth: float | None = None
    ring_latency_s: float | None = None
    lockstep_loss: float = 0.0

    def ring(self, first: int, second: int) -> tuple[float, float]:
        """(bandwidth, latency) of a collective's step between two global ranks."""
        bandwidth, latency = self.link(first, second)
        if first // self.gpus_per_node != second // self.gpus_per_node:
            return bandwidth, latency
        return (
            bandwidth if self.ring_bandwidth is None else self.ring_bandwidth,
            latency if self.ring_latency_s is None else self.ring_latency_s,
        )

    def link(self, first: int, second: int) -> tuple[float, float]:
        """(bandwidth, latency) between two global ranks."""
        if first // self.gpus_per_node == second // self.gpus_per_node:
            return self.intra_bandwidth, self.intra_latency_s
        return self.inter_bandwidth, self.inter_latency_s


# ----------------------------------------------------------------------------------- element sizes


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes of one element.

    Attributes:
        weight: Of the model, as it computes and is gathered.
        gradient: Of its sum.
        wire: Of a gradient on its way to be reduced.
        activation: Kept, and sent from stage to stage.
        moment: Of the optimizer's state.
        main: Of the optimizer's own copy of the weights; 0 where it updates the model's.
    """

    weight: int = 4
    gradient: int = 4
    wire: int = 4
    activation: int = 4
    moment: int = 4
    main: int = 0

    @classmethod
    def all(cls, size: int) -> ElementSizes:
        """One size for everything, and no copy."""
        return cls(size, size, size, size, size)
