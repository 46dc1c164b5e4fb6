"""Which process groups a layout needs, in one order on all processes."""

from __future__ import annotations

from collections.abc import Iterable

from strategies.ir.placement import Placement
from strategies.runtime.mesh import Communicators, Coordinates

Wanted = list[tuple[str, tuple[int, ...]]]


def holders_of(
    stages: Iterable[int], placement: Placement, where: Coordinates, sharer: int | None = None
) -> tuple[int, ...]:
    """Global ranks that hold any of some stages, in all replicas.

    Args:
        stages: Of the model.
        placement: Stages to pipeline ranks.
        where: This process, for the degrees.
        sharer: Of which tensor-parallel rank; None for this process's own.
    """
    owners = sorted({rank for stage in stages for rank in placement.owners(stage)})
    return where.replicas(tuple(owners), sharer)


def tensor_groups(where: Coordinates) -> Wanted:
    """Who shares the matrices of a stage; needed before the model is cut."""
    ranks = range(where.pp)
    return [("tensor", where.sharers(pp, dp)) for pp in ranks for dp in range(where.dp)]


def running_groups(
    where: Coordinates,
    placement: Placement,
    shared: Iterable[tuple[int, ...]],
    *,
    shards: bool,
    pairs: bool,
) -> Wanted:
    """All groups that any rank's program needs.

    Args:
        where: This process, for the degrees.
        placement: Stages to pipeline ranks.
        shared: Per weight that several stages use, those stages.
        shards: Whether weights are sharded over the replicas.
        pairs: Whether every ordered pair of a pipeline's ranks talks in a group of its own.
    """
    shared = tuple(shared)
    wanted: Wanted = [("control", where.replica(replica)) for replica in range(where.dp)]
    if shards:
        wanted.append(("control", tuple(range(where.world_size))))
    for sharer in range(where.tp):
        for replica in range(where.dp):
            pipeline = where.pipeline(replica, sharer)
            wanted.append(("messages", pipeline))
            if pairs:
                ordered = ((a, b) for a in pipeline for b in pipeline if a != b)
                wanted += [("messages", pair) for pair in ordered]
        for stage in range(placement.num_stages):
            owners = where.replicas(placement.owners(stage), sharer)
            wanted.append(("reduce", owners))
            if shards:
                # Optimizer state is put together from host memory.
                wanted.append(("control", owners))
        wanted += [("reduce", holders_of(s, placement, where, sharer)) for s in shared]
        wanted += [("metrics", where.replicas((rank,), sharer)) for rank in range(where.pp)]
    return wanted


def checkpoint_groups(where: Coordinates) -> Wanted:
    """One rank's disk may take much longer than any message between ranks."""
    return [("checkpoint", tuple(range(where.world_size)))]


def create(communicators: Communicators, wanted: Wanted, *, backend: str, timeout_s: float) -> None:
    """Makes groups; collective over all processes.

    Args:
        communicators: Where they are kept.
        wanted: The same list on all processes.
        backend: What carries boundary tensors; what is small or waits for a disk goes by gloo.
        timeout_s: How long an operation waits.
    """
    if communicators.coordinates.world_size > 1:
        fast = "nccl" if backend == "nccl" else "gloo"
        backends = {
            "control": "gloo", "metrics": "gloo", "messages": fast, "reduce": fast,
            "tensor": fast, "checkpoint": "gloo",
        }  # fmt: skip
        communicators.create(wanted, backends=backends, timeout_s=timeout_s)
