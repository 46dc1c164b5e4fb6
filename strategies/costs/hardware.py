"""The machine that analytic costs assume: peaks, links, and how much of the peak is reached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2
from typing import Literal, NamedTuple, Self

from strategies.errors import CostError

# What matrix products are computed in; each has a peak of its own.
NumberFormat = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Figures of one kind of rank and its links.

    Attributes:
        name: Label in reports.
        peak_flops: FLOP/s of one rank, in every number format that has none of its own below; None
            where a format without one is one that the rank cannot compute in.
        efficiency: Share of the peak that kernels reach, 0 to 1; with ``num_sms`` the share that
            large products reach in whole waves of whole tiles.
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
        peak_fp64_flops: FLOP/s of one rank in that number format, dense; None for ``peak_flops``.
            The same of the other five.
        num_sms: Multiprocessors of a GPU, whose units take what their kernels take; None where
            ``efficiency`` holds for all sizes.
        bandwidth_efficiency: Share of ``memory_bandwidth`` that kernels reach.
        attention_efficiency: Share of the peak that a fused attention core reaches, of the FLOPs
            that a causal mask leaves. Only with ``num_sms``.
        kernel_overhead_s: What starting a kernel takes. Only with ``num_sms``.
        message_overhead_s: What a message from stage to stage takes beside its link's latency.
        context_gb: What a process takes of the memory before it has a model: the device's context,
            kernels, workspaces of libraries; in 1e9 bytes.
        communicator_gb: What the buffers of one communicator take, in 1e9 bytes.
        allocator_loss: What an allocator has reserved beyond what it has handed out, over that.
    """

    name: str
    peak_flops: float | None
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
    peak_fp64_flops: float | None = None
    peak_fp32_flops: float | None = None
    peak_tf32_flops: float | None = None
    peak_bf16_flops: float | None = None
    peak_fp16_flops: float | None = None
    peak_fp8_flops: float | None = None
    num_sms: int | None = None
    bandwidth_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    kernel_overhead_s: float = 0.0
    message_overhead_s: float = 0.0
    context_gb: float = 0.0
    communicator_gb: float = 0.0
    allocator_loss: float = 0.0

    def of_ranks(self, num_ranks: int) -> Self:
        """The same for so many ranks in all: those that fit on one node are on one."""
        if num_ranks >= self.gpus_per_node:
            return self
        return replace(self, gpus_per_node=num_ranks)

    def named_peaks(self) -> dict[NumberFormat, float]:
        """Number formats with a peak of their own."""
        known: tuple[tuple[NumberFormat, float | None], ...] = (
            ("fp64", self.peak_fp64_flops),
            ("fp32", self.peak_fp32_flops),
            ("tf32", self.peak_tf32_flops),
            ("bf16", self.peak_bf16_flops),
            ("fp16", self.peak_fp16_flops),
            ("fp8", self.peak_fp8_flops),
        )
        return {name: peak for name, peak in known if peak is not None}

    def peak(self, number_format: NumberFormat) -> float:
        """FLOP/s of one rank: what all that reads a peak asks.

        Raises:
            CostError: There is none.
        """
        found = self.named_peaks().get(number_format, self.peak_flops)
        if found is None:
            raise CostError(
                f"{self.name} has no peak for {number_format}: it has one for "
                f"{', '.join(self.named_peaks()) or 'no format'}. "
                f"Try hardware.peak_{number_format}_flops=1e13, in FLOP/s of one rank."
            )
        return found

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


# --------------------------------------------------------------------------------------------------
# Time of a reduce-scatter or an all-gather; each is half an all-reduce.
#
# On one node a ring: (n-1)/n of the bytes, and n-1 steps; on GPUs, which a switch connects, small
# tensors take as many steps as the logarithm, and all bytes. (NCCL's model of itself,
# src/graph/tuning.cc, still has n-1 steps for these, each a sixth as long: less than here.)
#
# On several nodes GPUs do it in two levels: the members of a node share first, over the node's own
# links, then each works with its fellows on the other nodes, over its own network interface, on its
# part; the node with fewest members has as few interfaces. Between nodes the ring has as many steps
# as nodes; a tree has as many as their logarithm, and moves all bytes instead of (n-1)/n of them:
# libraries choose by size. Machines that are no GPUs have one interface for all, and a flat ring.
#
# Tokens of experts go from everybody to everybody, which is no ring.
class Group(NamedTuple):
    """Ranks that share: on how many nodes, and how many on the fullest and on the emptiest.

    ``slowest`` is the (bandwidth, latency) that a flat ring over all of them is held to.
    """

    num_ranks: int
    num_nodes: int
    per_node: int
    fewest: int
    slowest: tuple[float, float]


@lru_cache(maxsize=8192)
def replicas(hardware: Hardware, owners: tuple[int, ...], dp: int, tp: int) -> Group:
    """The replicas of a stage on its owners: one of the ``tp`` ranks that share its matrices."""
    members = [(owner * dp + replica) * tp for owner in owners for replica in range(dp)]
    return _group(hardware, members)


def sharers(hardware: Hardware, tp: int) -> Group:
    """Ranks that share the matrices of a stage: neighbours.

    Where they divide no node evenly, those that lie on two count: all others wait for them.
    """
    return exchangers(hardware, tp)


def reduce_scatter_seconds(hardware: Hardware, group: Group, num_bytes: float) -> float:
    """Seconds of a reduce-scatter, or an all-gather, of a tensor of so many bytes."""
    ranks, nodes, per_node, fewest, slowest = group
    if ranks < 2:
        return 0.0
    if hardware.num_sms is None:
        bandwidth, latency = slowest
        return (ranks - 1) / ranks * num_bytes / bandwidth + (ranks - 1) * latency
    inside = 0.0
    if per_node > 1:
        bandwidth, latency = hardware.ring(0, 1)
        inside = min(
            (per_node - 1) / per_node * num_bytes / bandwidth + (per_node - 1) * latency,
            num_bytes / bandwidth + ceil(log2(per_node)) * latency,
        )
    if nodes == 1:
        return inside
    part = num_bytes / fewest / hardware.inter_bandwidth
    ring = (nodes - 1) / nodes * part + (nodes - 1) * hardware.inter_latency_s
    tree = part + ceil(log2(nodes)) * hardware.inter_latency_s
    return inside + min(ring, tree)


@lru_cache(maxsize=1024)
def exchangers(hardware: Hardware, ep: int, apart: int = 1) -> Group:
    """Ranks that hold all experts of a stage: every ``apart``-th of a block of neighbours.

    Of all blocks, the one over the most nodes.
    """
    size = ep * apart
    blocks = [
        _group(hardware, list(range(first, first + size, apart)))
        for first in range(0, size * hardware.gpus_per_node, size)
    ]
    return max(blocks, key=lambda group: (group.num_nodes, -group.fewest))


@lru_cache(maxsize=8192)
def expert_holders(hardware: Hardware, owners: tuple[int, ...], dp: int, tp: int, ep: int) -> Group:
    """Ranks that hold the same experts of a stage, one of each block on its owners."""
    places = dp * tp
    members = [owner * places + place for owner in owners for place in range(0, places, ep)]
    return _group(hardware, members)


def all_to_all(hardware: Hardware, group: Group, num_bytes: float) -> float:
    """Seconds until every rank has sent its ``num_bytes`` to all, an equal part to each.

    GPUs send to all others at one time, those of their node over its links and the rest over their
    own network interface; machines that are no GPUs have one interface, and send in turn.
    """
    ranks, nodes, per_node, fewest, slowest = group
    if ranks < 2:
        return 0.0
    part = num_bytes / ranks
    if hardware.num_sms is None:
        bandwidth, latency = slowest
        return (ranks - 1) * (part / bandwidth + latency)
    bandwidth, latency = hardware.ring(0, 1)
    inside = (per_node - 1) * part / bandwidth + latency if per_node > 1 else 0.0
    if nodes == 1:
        return inside
    away = (ranks - fewest) * part / hardware.inter_bandwidth + hardware.inter_latency_s
    return max(inside, away)


def _group(hardware: Hardware, members: list[int]) -> Group:
    nodes: dict[int, int] = {}
    for member in members:
        node = member // hardware.gpus_per_node
        nodes[node] = nodes.get(node, 0) + 1
    pairs = zip(members, members[1:] + members[:1], strict=True)
    links = {hardware.ring(first, second) for first, second in pairs}
    slowest = min(link[0] for link in links), max(link[1] for link in links)
    fullest, emptiest = max(nodes.values()), min(nodes.values())
    return Group(len(members), len(nodes), fullest, emptiest, slowest)
