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

    def link(self, first: int, second: int) -> tuple[float, float]:
        """(bandwidth, latency) between two global ranks."""
        if first // self.gpus_per_node == second // self.gpus_per_node:
            return self.intra_bandwidth, self.intra_latency_s
        return self.inter_bandwidth, self.inter_latency_s
