"""How long ranks take to reduce-scatter, or to gather, what they share: half of an all-reduce.

On one node a ring: (n-1)/n of the bytes, and n-1 steps. On several, GPUs do it in two levels: the
members of a node share first, over the node's own links, then each works with its fellows on the
other nodes, over its own network interface, on its part. Between nodes the ring has as many steps
as nodes; a tree has as many as their logarithm, and moves all bytes instead of (n-1)/n of them:
libraries choose by size. Machines that are no GPUs have one interface for all, and a flat ring.

Tokens of experts go from everybody to everybody, which is no ring.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

from strategies.costs.hardware import Hardware


class Group(NamedTuple):
    """Ranks that share: on how many nodes, and how many of them on the fullest.

    ``slowest`` is the (bandwidth, latency) that a flat ring over all of them is held to.
    """

    num_ranks: int
    num_nodes: int
    per_node: int
    slowest: tuple[float, float]


@lru_cache(maxsize=8192)
def replicas(hardware: Hardware, owners: tuple[int, ...], dp: int, tp: int) -> Group:
    """The replicas of a stage on its owners: one of the ``tp`` ranks that share its matrices."""
    members = [(owner * dp + replica) * tp for owner in owners for replica in range(dp)]
    return _group(hardware, members)


@lru_cache(maxsize=1024)
def sharers(hardware: Hardware, tp: int) -> Group:
    """Ranks that share the matrices of a stage: neighbours."""
    return _group(hardware, list(range(tp)))


def half_round(hardware: Hardware, group: Group, num_bytes: float) -> float:
    """Seconds of a reduce-scatter, or an all-gather, of a tensor of so many bytes."""
    ranks, nodes, per_node, slowest = group
    if ranks < 2:
        return 0.0
    bandwidth, latency = slowest
    if nodes == 1 or hardware.num_sms is None:
        return (ranks - 1) / ranks * num_bytes / bandwidth + (ranks - 1) * latency
    inside = 0.0
    if per_node > 1:
        bandwidth, latency = hardware.ring(0, 1)
        inside = (per_node - 1) / per_node * num_bytes / bandwidth + (per_node - 1) * latency
    part = num_bytes / per_node / hardware.inter_bandwidth
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
    return max(blocks, key=lambda group: (group.num_nodes, -group.per_node))


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
    ranks, nodes, per_node, slowest = group
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
    away = (ranks - per_node) * part / hardware.inter_bandwidth + hardware.inter_latency_s
    return max(inside, away)


def _group(hardware: Hardware, members: list[int]) -> Group:
    nodes: dict[int, int] = {}
    for member in members:
        node = member // hardware.gpus_per_node
        nodes[node] = nodes.get(node, 0) + 1
    pairs = zip(members, members[1:] + members[:1], strict=True)
    links = {hardware.ring(first, second) for first, second in pairs}
    slowest = min(link[0] for link in links), max(link[1] for link in links)
    return Group(len(members), len(nodes), max(nodes.values()), slowest)
